"""Export of an ensemble as one file for other programs: preprocessing, members and averaging in one graph.

M members, B batch, C classes. The graph takes a batch of 1 or more and gives what `Ensemble.predict` gives.
"""

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import __version__, _checks
from ._files import replacing
from ._messages import first_line, needing_extra
from .data.transforms import Transform
from .ensemble import Ensemble, Prediction, prediction, probabilities

FORMATS = ("onnx", "torch")
ONNX = ("onnx", "onnxscript", "onnxruntime")  # packages that its export needs
OUTPUTS = Prediction._fields  # probs (B, C, ...), member_probs (M, B, C, ...), entropy (M, B), chosen (B,)
TOLERANCE = 1e-4
ABOUT = "about.json"  # an extra file inside a program of torch.export; ONNX has a place for such texts
_ONE_FILE = 2**31 - 2**27  # bytes of weights: a protobuf file ends at 2 GiB

Runner = Callable[[Tensor], Sequence[Tensor]]


class Exported(NamedTuple):
    """A written file, compared with the ensemble it came from."""

    path: Path
    format: str
    input: str  # type and shape of what goes in
    examples: int  # that were compared
    differences: dict[str, float]  # by output, the largest; of `chosen`, in the entropy it is chosen by


class Graph(nn.Module):
    """From a batch, raw if there is a transform, to the four outputs."""

    def __init__(self, ensemble: Ensemble, transform: Transform | None) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.preprocess = None if transform is None else transform.float32_function()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The outputs by name, because readers of the file may not have cmcl and its classes."""
        logits = self.ensemble.test_logits(x if self.preprocess is None else self.preprocess(x.float()))
        return prediction(probabilities(logits), self.ensemble.temperature)._asdict()


@torch.no_grad()
def export(
    ensemble: Ensemble,
    path: str | Path,
    example: Tensor,
    *,
    format: str = "onnx",
    classes: Sequence[str] | None = None,
    checksum: str | None = None,
) -> Exported:
    """Write the ensemble with its preprocessing as one graph, and compare it with PyTorch on `example`.

    Features are shared in mode "expected". The file is written only if every output agrees with
    `ensemble.predict(example)` within 1e-4, for one image alone as for all together.

    Args:
        ensemble: a trained ensemble; it is left as it is.
        path: the file to write, such as model.onnx or model.pt2.
        example: a batch of real inputs, 2 or more. Its type is that of the graph's input: with an
            `ensemble.transform`, uint8 images (B, C, H, W) go through it inside the graph; anything else
            goes to the members as it is. The batch is dynamic, the other dimensions are the example's.
        format: "onnx", or "torch" for a program of torch.export (read by torch.export.load).
        classes: their names, stored in the file; left out, those of `ensemble.classes`.
        checksum: of the weights, stored in the file: `cmcl.serialization.saved_checksum(folder)`.
    """
    _checks.choice("format", format, FORMATS)
    if len(_checks.inputs(example)) < 2:
        raise ValueError(f"example must hold at least 2 inputs. Got {_checks.kind(example)}.")
    if format == "onnx":
        _need_onnx()
    path, example = Path(path), example.detach().cpu()
    if path.is_dir():
        raise ValueError(f"path must be a file to write, such as {path / f'model.{format}'}. Got a folder.")
    fixed = copy.deepcopy(ensemble).cpu().eval().requires_grad_(False)  # or the file computes gradients
    if fixed.share_at_test == "sampled":
        fixed.share_at_test = "expected"
    transform = fixed.transform if example.dtype == torch.uint8 else None
    expected = _predict(fixed, example if transform is None else transform.transform(example))
    about = _about(fixed, expected, classes, checksum)
    program = _trace(Graph(fixed, transform).eval(), example)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        runner = (_write_onnx if format == "onnx" else _write_torch)(program, part, about)
        differences = _compare(runner, example, expected)
    kind = str(example.dtype).removeprefix("torch.")
    sizes = ", ".join(map(str, ("batch", *example.shape[1:])))
    return Exported(path, format, f"{kind} ({sizes})", len(example), differences)


def onnx_runner(path: str | Path) -> Runner:
    """A function from a batch to the four outputs, computed by onnxruntime on the CPU."""
    _need_onnx()
    onnxruntime = import_module("onnxruntime")  # it has no types
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(y) for y in session.run(list(OUTPUTS), {"input": x.numpy()})]


def _predict(ensemble: Ensemble, x: Tensor) -> Prediction:
    try:
        return prediction(probabilities(ensemble.test_logits(x)), ensemble.temperature)
    except (RuntimeError, IndexError) as error:
        types = {str(p.dtype).removeprefix("torch.") for p in ensemble.parameters()}
        raise ValueError(
            f"example must be a batch that the members take; they compute in {', '.join(sorted(types))}. "
            f"Got {_checks.kind(x)}. torch says: {first_line(error)}."
        ) from error


def _about(
    ensemble: Ensemble, found: Prediction, classes: Sequence[str] | None, checksum: str | None
) -> dict[str, str]:
    """What the file says about itself; ONNX stores only texts."""
    count, own = found.probs.shape[1], ensemble.classes
    if classes is not None and len(classes) != count:
        raise ValueError(f"classes must name the {count} outputs of the ensemble. Got {len(classes)}.")
    if classes is None and own and len(own) == count:  # networks may have more outputs than names
        classes = own
    known = {
        "cmcl": __version__,
        "members": str(len(ensemble.members)),
        "sharing": "off" if ensemble.share_after is None else ensemble.share_at_test,
        "temperature": None if ensemble.temperature is None else str(ensemble.temperature),
        "weights_sha256": checksum,
        "classes": None if classes is None else json.dumps(list(classes), ensure_ascii=False),
    }
    return {name: text for name, text in known.items() if text is not None}


def _trace(graph: Graph, example: Tensor) -> torch.export.ExportedProgram:
    """The operations as torch.export records them, which cannot record everything Python can do."""
    with _quiet("torch"):
        try:
            return torch.export.export(graph, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        except Exception as error:  # of many types, most of them private
            reason = f"{type(error).__name__}: {first_line(error)}"
    # Not "from error": that one carries pages of torch's own state.
    raise ValueError(
        "the members must be networks that torch.export can record: no Python `if` on the values of tensors, "
        f"no TorchScript. Got {reason}. Put torch.where in place of the `if`; "
        "docs/tutorials/export.md has more cases."
    )


def _write_onnx(program: torch.export.ExportedProgram, path: Path, about: dict[str, str]) -> Runner:
    size = sum(value.nbytes for value in [*program.state_dict.values(), *program.constants.values()])
    if size > _ONE_FILE:
        raise ValueError(
            f"an ensemble must stay below 2 GiB to fit into one ONNX file. Got {size:,} bytes. "
            "Export it with format='torch'."
        )
    try:
        with _quiet("torch.onnx"):
            written = torch.onnx.export(
                program,
                dynamo=True,
                input_names=["input"],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: "batch"},),  # it is dynamic already: this is its name
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the innermost names the operation
            cause = cause.__cause__
        raise ValueError(
            f"ONNX must have every operation of the network. Got {first_line(cause)}. "
            "Put other operations in its place, or export with format='torch'."
        ) from None
    assert written is not None  # with dynamo it is the program
    written.model.metadata_props.update(about)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # lines of code with their paths on this machine
    written.save(path, external_data=False)
    return onnx_runner(path)


def _write_torch(program: torch.export.ExportedProgram, path: Path, about: dict[str, str]) -> Runner:
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # lines of code with their paths on this machine
    memory = io.BytesIO()  # torch's own writer ends the whole process on a full disk
    torch.export.save(program, memory, extra_files={ABOUT: json.dumps(about)})
    path.write_bytes(memory.getbuffer())
    with path.open("rb") as file:
        module = torch.export.load(file).module()
    return lambda x: list(module(x).values())


def _compare(run: Runner, example: Tensor, expected: Prediction) -> dict[str, float]:
    """The largest differences, of the batch and of its first example alone."""
    found = dict.fromkeys(OUTPUTS, 0.0)
    for count in (len(example), 1):
        probs, member_probs, entropies, chosen = run(example[:count])
        wanted = expected.entropy[:, :count]
        pairs = {
            "probs": (probs, expected.probs[:count]),
            "member_probs": (member_probs, expected.member_probs[:, :count]),
            "entropy": (entropies, wanted),
            # Two members may be equally confident up to rounding: then either may be chosen.
            "chosen": (wanted.gather(0, chosen[None])[0], wanted.amin(0)),
        }
        for name, (ours, theirs) in pairs.items():
            found[name] = max(found[name], (ours - theirs).abs().max().item())
    if worst := {name: value for name, value in found.items() if not value <= TOLERANCE}:
        raise ValueError(
            f"the exported graph must agree with PyTorch within {TOLERANCE:g}. Got {worst}. "
            "Does the network do something in Python that tracing freezes?"
        )
    return found


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence the exporter's warnings about its own future and optional packages, and its tracebacks."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _need_onnx() -> None:
    with needing_extra("export", *ONNX):
        for name in ONNX:
            import_module(name)
