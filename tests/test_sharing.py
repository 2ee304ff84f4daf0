"""Feature sharing: what is passed on, how often, to whom, and at what cost in memory."""

import re
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from cmcl import share_features
from helpers import draw_masks


def features(members, *shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(members)]


def test_hand_worked():
    """Three members, two values each; member 1 gets all of 0 and none of 2."""
    h = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]]), torch.tensor([[100.0, 200.0]])]
    masks = torch.zeros(3, 3, 1, 2, dtype=torch.bool)
    masks[0, 1] = True
    masks[2, 0, 0, 1] = True
    mixed = share_features(h, masks=masks)
    assert [m.tolist() for m in mixed] == [[[1, 202]], [[11, 22]], [[100, 200]]]


def test_the_diagonal_of_the_masks_is_not_read():
    h = features(3, 2, 4)
    masks = draw_masks(h)
    other = masks.clone()
    other[range(3), range(3)] ^= True
    for a, b in zip(share_features(h, masks=masks), share_features(h, masks=other), strict=True):
        assert a.equal(b)


@settings(max_examples=30, deadline=None)
@given(members=st.integers(1, 6), prob=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_expected_is_the_formula_with_prob_for_the_mask(members, prob, seed):
    h = features(members, 2, 3, seed=seed, dtype=torch.float64)
    for m, mixed in enumerate(share_features(h, prob=prob, mode="expected")):
        expected = h[m] + sum(prob * h[n] for n in range(members) if n != m)
        torch.testing.assert_close(mixed, expected)


def test_expected_is_the_mean_of_sampled():
    h = [value.expand(20_000, 3) for value in features(3, 1, 3)]  # the same example many times
    sampled = share_features(h, generator=torch.Generator().manual_seed(0))
    expected = share_features(h, mode="expected")
    for a, b in zip(sampled, expected, strict=True):
        torch.testing.assert_close(a.mean(0), b.mean(0), rtol=0, atol=0.03)


@pytest.mark.parametrize("mode", ["sampled", "expected", "off"])
def test_a_stacked_tensor_is_as_good_as_a_list(mode):
    stacked = torch.stack(features(3, 2, 4))
    both = [
        share_features(h, mode=mode, generator=torch.Generator().manual_seed(0))
        for h in (stacked, [*stacked])
    ]
    assert [len(mixed) for mixed in both] == [3, 3]
    assert torch.stack(both[0]).equal(torch.stack(both[1]))


def test_off_leaves_members_alone():
    h = features(3, 2, 4)
    assert all(a is b for a, b in zip(share_features(h, mode="off"), h, strict=True))


def test_certain_and_impossible_masks():
    h = features(3, 2, 4)
    for everything in share_features(h, prob=1):
        torch.testing.assert_close(everything, sum(h))
    for a, b in zip(share_features(h, prob=0), h, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prob", [0.1, 0.7])
def test_rate_and_independence_of_the_masks(prob, dtype):
    """Powers of two for features: which masks were drawn can be read off the sum, exactly.

    Six members, five masks each: more than one random number makes.
    """
    shape = (50, 8, 10, 10)  # 40,000 values: the standard error of a rate is below 0.0025
    h = [torch.full(shape, float(2**n), dtype=dtype) for n in range(6)]
    mixed = share_features(h, prob=prob, generator=torch.Generator().manual_seed(0))
    masks = {(n, m): (mixed[m].long() >> n) & 1 for m in range(6) for n in range(6) if n != m}
    for mask in masks.values():
        for axes in [(0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1)]:  # overall, per example, channel, position
            rate = mask.double().mean(axes)
            tolerance = 5 * (prob * (1 - prob) / (mask.numel() / rate.numel())) ** 0.5
            assert (rate - prob).abs().max() < tolerance
    pairs = torch.stack([mask.flatten() for mask in masks.values()]).double()
    correlation = torch.corrcoef(pairs) - torch.eye(len(pairs))
    assert correlation.abs().max() < 0.025, "ordered pairs draw independently"


@pytest.mark.parametrize("prob", [1e-5, 3e-5, 1 - 1e-5])
def test_rare_masks_have_their_rate(prob):
    """15 bits would round 1e-5 to never: a tiny probability must still share."""
    h = [torch.full((1_000_000,), float(2**n)) for n in range(4)]
    shared = share_features(h, prob=prob, generator=torch.Generator().manual_seed(0))
    count = sum(
        ((value.long() >> n) & 1).sum().item() for m, value in enumerate(shared) for n in {*range(4)} - {m}
    )
    expected, deviation = 12e6 * prob, (12e6 * prob * (1 - prob)) ** 0.5
    assert abs(count - expected) < 5 * deviation


@pytest.mark.parametrize(
    ("prob", "draws"), [(0.7, 1), (0.0, 1), (1.0, 1), (1e-5, 2), (1 - 1e-5, 2), (1e-7, 4)]
)
def test_sixty_random_bits_make_as_many_masks_as_the_probability_allows(prob, draws, monkeypatch):
    """Four masks a member, each of 15, 30 or 60 bits, so that the rate is right to a thousandth of itself."""
    made, randint = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **k: made.append(1) or randint(*a, **k))
    share_features(features(5, 2, 3), prob=prob)
    assert len(made) == 5 * draws


def test_nothing_is_shared_with_probability_0():
    """Not even the one value in 2 ** 15 whose random bits are all 0."""
    h = [torch.zeros(1_000_000), torch.ones(1_000_000)]
    assert share_features(h, prob=0, generator=torch.Generator().manual_seed(0))[0].sum() == 0


def check_gradients_use_the_drawn_masks(share, device):
    """Features are powers of two, so that sums tell which masks were drawn; the gradient must be the same ones."""
    h = [torch.full((40, 1000), float(2**n), device=device, requires_grad=True) for n in range(4)]
    shared = share(h)
    weights = [3.0, 10.0, 100.0, 1000.0]  # of member m in the sum: a gradient tells to whom a value went
    sum(w * value.sum() for w, value in zip(weights, shared, strict=True)).backward()
    masks = [[((value.long() >> n) & 1) for value in shared] for n in range(4)]  # [n][m]; n = m: one
    for n in range(4):
        expected = sum(w * mask for w, mask in zip(weights, masks[n], strict=True))
        torch.testing.assert_close(h[n].grad, expected)
        rates = [mask.double().mean().item() for m, mask in enumerate(masks[n]) if m != n]
        assert all(abs(rate - 0.7) < 5 * (0.21 / 40_000) ** 0.5 for rate in rates)


def test_gradients_use_the_drawn_masks():
    check_gradients_use_the_drawn_masks(share_features, "cpu")


@pytest.mark.slow
def test_compiled_masks_are_drawn_in_the_kernel_that_adds():
    """One kernel, and one draw of seeds: inductor fuses the draws, because no generator is named."""
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    fast = torch.compile(share_features, fullgraph=True, dynamic=False)
    check_gradients_use_the_drawn_masks(fast, "cpu")
    torch.compiler.reset()
    _, (code, *_) = run_and_get_code(torch.compile(share_features, dynamic=False), features(3, 4, 5))
    assert code.count("aten.randint") == 1, "the seeds"
    assert len(set(re.findall(r"cpp_fused_\w+", code))) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: torch.compile(f, fullgraph=True, dynamic=False)])
def test_gradients_use_the_drawn_masks_on_a_gpu(wrap):
    check_gradients_use_the_drawn_masks(wrap(share_features), "cuda")


def test_deterministic_by_generator():
    h = features(3, 4, 5)
    first, again, other = (
        share_features(h, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)


def test_gradients_flow_to_the_other_stems():
    h = [value.requires_grad_() for value in features(3, 2, 4)]
    masks = draw_masks(h)
    share_features(h, masks=masks)[1].sum().backward()
    assert h[0].grad.equal(masks[0, 1].float())
    assert h[1].grad.equal(torch.ones(2, 4))
    assert h[2].grad.equal(masks[2, 1].float())


def peak_bytes(step):
    """The most memory alive at once during `step`, from PyTorch's own record of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("members", [2, 5, 10])
def test_training_memory(members):
    """At most M-1 bytes per feature value (the masks) and two feature maps per member."""
    values = members * 4 * 16 * 16 * 16

    def step(mode):
        h = [value.requires_grad_() for value in features(members, 4, 16, 16, 16)]
        sum(mixed.square().sum() for mixed in share_features(h, mode=mode)).backward()

    step("sampled")  # whatever is allocated only once
    extra = peak_bytes(lambda: step("sampled")) - peak_bytes(lambda: step("off"))
    assert extra / values <= members - 1 + 2 * 4


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(backend):
    torch.compiler.reset()
    h = features(3, 4, 5)
    masks = draw_masks(h)
    fast = torch.compile(share_features, fullgraph=True, backend=backend)
    for a, b in zip(fast(h, masks=masks), share_features(h, masks=masks), strict=True):
        torch.testing.assert_close(a, b)
    assert not fast(h)[0].equal(fast(h)[0]), "fresh masks at every call"


WRONG = {
    "shapes differ": (dict(features=[torch.zeros(2, 3), torch.zeros(2, 4)]), r"Got \(2, 3\) from member 0 and \(2, 4\) from member 1"),
    "none": (dict(features=[]), "features must hold one tensor a member. Got none"),
    "none stacked": (dict(features=torch.zeros(0, 2, 3)), "features must hold one tensor a member. Got none"),
    "mode": (dict(mode="expect"), "mode must be one of 'sampled', 'expected', 'off'. Got 'expect'"),
    "prob": (dict(prob=1.5), "prob must be between 0 and 1. Got 1.5"),
    "masks shape": (dict(masks=torch.ones(2, 2, 3, dtype=torch.bool)), r"masks must be a boolean tensor of shape \(2, 2, 2, 3\)"),
    "masks dtype": (dict(masks=torch.ones(2, 2, 2, 3)), "masks must be a boolean tensor"),
    "devices": (dict(features=[torch.zeros(2, 3), torch.zeros(2, 3, device="meta")]), r"features\[1\] must be on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named(case):
    changed, message = WRONG[case]
    arguments = {"features": [torch.zeros(2, 3), torch.zeros(2, 3)], **changed}
    with pytest.raises(ValueError, match=message):
        share_features(arguments.pop("features"), **arguments)
