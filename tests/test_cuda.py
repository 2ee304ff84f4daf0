"""On a real GPU: no hidden waits, one CUDA graph, fresh draws at every replay, memory as promised."""

import warnings

import pytest
import torch

import cmcl
from cmcl import Ensemble, confident_oracle_loss, share_features

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(shape, generator=generator, device="cuda", requires_grad=True)
    targets = torch.randint(shape[2], (shape[1], *shape[3:]), generator=generator, device="cuda")
    return logits, targets


def captured(step):
    """`step` in a CUDA graph, warmed up; its outputs are refreshed by replay()."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


@pytest.fixture
def no_waiting():
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(5, 128, 10), (3, 8, 2, 25, 31)])
@pytest.mark.parametrize("labels", ["exact", "sampled"])
def test_the_objective_never_waits_for_the_device(shape, labels, no_waiting):
    logits, targets = draw(*shape)
    loss = confident_oracle_loss(logits, targets, overlap=2, labels=labels, ignore_index=1)
    loss.total.backward()


@pytest.mark.parametrize("shape", [(5, 128, 10), (3, 8, 2, 25, 31)])
def test_the_objective_in_a_cuda_graph(shape):
    logits, targets = draw(*shape)

    def step():
        loss = confident_oracle_loss(logits, targets, overlap=2)
        return loss.total.detach(), loss.assignment, torch.autograd.grad(loss.total, logits)[0]

    graph, (total, assignment, gradient) = captured(step)
    with torch.no_grad():
        logits.copy_(draw(*shape, seed=1)[0])
    graph.replay()
    expected, expected_assignment, expected_gradient = step()
    assert assignment.equal(expected_assignment)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_gpu_and_cpu_agree():
    logits, targets = draw(5, 64, 10)
    ours, theirs = (
        confident_oracle_loss(z, y, overlap=3) for z, y in [(logits, targets), (logits.cpu(), targets.cpu())]
    )
    assert ours.assignment.cpu().equal(theirs.assignment)
    torch.testing.assert_close(ours.total.cpu(), theirs.total)


def test_ties_go_to_the_lowest_member():
    loss = confident_oracle_loss(
        torch.zeros(5, 300, 4).cuda(), torch.zeros(300, dtype=torch.long).cuda(), overlap=2
    )
    assert loss.assignment.float().mean(1).tolist() == [1, 1, 0, 0, 0]


def test_every_replay_draws_new_labels_and_masks():
    logits, targets = draw(5, 128, 10)
    features = [torch.randn(16, 8, device="cuda") for _ in range(3)]

    def step():
        total = confident_oracle_loss(logits, targets, labels="sampled").total.detach()
        return total, share_features(features)[0]

    graph, (total, mixed) = captured(step)
    seen = []
    for _ in range(4):
        graph.replay()
        seen.append((total.item(), mixed.sum().item()))
    assert len({a for a, _ in seen}) == len({b for _, b in seen}) == 4


def test_generators_can_be_captured():
    generator = torch.Generator("cuda").manual_seed(3)
    logits, targets = draw(5, 128, 10)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        total = confident_oracle_loss(logits, targets, labels="sampled", generator=generator).total
    graph.replay()
    first = total.item()
    graph.replay()
    assert total.item() != first


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32(dtype):
    logits, targets = draw(3, 16, 1000)
    with torch.autocast("cuda", dtype):
        loss = confident_oracle_loss(logits.to(dtype), targets)
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total, confident_oracle_loss(logits.to(dtype).float(), targets).total)


@pytest.mark.parametrize("members", [2, 5, 10])
def test_sharing_memory(members):
    """At most M-1 bytes per feature value and two feature maps per member, as on the CPU."""
    values = members * 32 * 16 * 32 * 32

    def peak(mode):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        h = [torch.randn(32, 16, 32, 32, device="cuda", requires_grad=True) for _ in range(members)]
        sum(mixed.square().sum() for mixed in share_features(h, mode=mode)).backward()
        return torch.cuda.max_memory_allocated() - start

    peak("sampled")
    assert (peak("sampled") - peak("off")) / values <= members - 1 + 2 * 4


@pytest.mark.parametrize("name", cmcl.networks.NETWORKS)
def test_networks_compile_and_agree(name, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # so that rounding is not a reason to differ
    torch.manual_seed(0)
    ensemble = Ensemble(cmcl.networks.NETWORKS[name], 2, share_after="stem").cuda().eval()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(ensemble, fullgraph=True)(x), ensemble(x), rtol=2e-3, atol=2e-3
        )


def test_predict_streams_from_the_cpu():
    ensemble = Ensemble(lambda: torch.nn.Linear(4, 3), 2).cuda()
    x = torch.randn(7, 4)
    streamed, whole = ensemble.predict(x, batch_size=3), ensemble.predict(x.cuda())
    assert streamed.probs.device.type == "cpu"
    torch.testing.assert_close(streamed.probs, whole.probs.cpu())


def test_mixed_devices_are_named():
    logits, targets = draw(2, 3, 4)
    with pytest.raises(ValueError, match=r"targets must be on cuda:0 like the rest. Got cpu"):
        confident_oracle_loss(logits, targets.cpu())
    with pytest.raises(ValueError, match=r"x must be on cuda:0 like the rest. Got cpu"):
        Ensemble(lambda: torch.nn.Linear(4, 3), 2).cuda()(torch.zeros(2, 4))


def test_debug_mode_looks_at_values(monkeypatch):
    logits, targets = draw(2, 3, 4)
    with torch.no_grad():
        logits[1, 0, 0] = torch.nan
    confident_oracle_loss(logits, targets)  # quiet: looking would wait for the device
    monkeypatch.setenv("CMCL_DEBUG", "1")
    with pytest.raises(ValueError, match=r"NaN or \+inf. Got that from member \[1\]"):
        confident_oracle_loss(logits, targets)
