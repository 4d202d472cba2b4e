"""Algorithm 1: the loss, the layouts, the residuals, and the settings beyond the paper at their neutral values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rcd.carry.residual import Residual, ResidualState
from rcd.data.examples import Example
from rcd.diffusion.noise import draw, generator_of, uniform
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM, View
from rcd.models.toy import toy
from rcd.train.batches import Batches, Batching
from rcd.train.layout import Batch
from rcd.train.loss import masked_cross_entropy
from rcd.train.objective import Objective
from rcd.train.residuals import ResidualSource
from tests.conftest import FAMILIES

B = 4
CAUSAL = ("sdar", "fast_dllm_qwen")
"""Outputs that predict their own positions, and the next ones."""


def model(family: str, seed: int = 3, **shape: Any) -> DiffusionLM:
    built = toy(family, seed=seed, block_length=B if family in CAUSAL else None, **shape).model.double()
    for parameter in built.parameters():
        parameter.requires_grad_(True)
    return built


EXAMPLES = [
    Example(f"example {n}", torch.randint(1, 100, (7 + 3 * n,), generator=generator_of("x", n)).tolist(), 3 + n % 4)
    for n in range(6)
]
BATCHING = Batching(total=6, device=6, block_length=B, pad_token_id=127)


def batch(**settings: Any) -> Batch:
    return Batches(EXAMPLES, replace(BATCHING, **settings)).step(0, 0)[0]


def behind(
    target: DiffusionLM, clean: torch.Tensor, noisy: torch.Tensor, start: int, carry: Any = None, state: Any = None
) -> torch.Tensor:
    """[1, B, D] what the head reads of the noisy block at `start`, behind the finished blocks before it."""
    ids = torch.cat((clean[:, :start], noisy[:, start : start + B]), dim=1)
    position = torch.arange(start + B)
    block = position // B
    view = View(position[None], (block[:, None] >= block)[None, None], None, slice(start, start + B))
    return target(ids, view, carry, state).hidden


def loss(objective: Objective, given: Batch | None = None, seed: int = 0) -> torch.Tensor:
    return objective(given or batch(), torch.Generator().manual_seed(seed)).total


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_chunked_loss_and_its_gradients_equal_the_plain_ones(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(20, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    target, weight = torch.arange(10) % 20, torch.rand(10, generator=generator)
    total, each = masked_cross_entropy(hidden, head, target, weight, chunk)
    (3 * total).backward()
    ours = hidden.grad, head.grad
    hidden.grad = head.grad = None
    plain = torch.nn.functional.cross_entropy(hidden @ head.t(), target, reduction="none")
    (3 * (plain * weight).sum()).backward()
    torch.testing.assert_close(each, plain.float())
    torch.testing.assert_close(ours[0], hidden.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours[1], head.grad, atol=1e-6, rtol=1e-5)


def test_the_prompt_is_never_masked_and_the_rate_is_t() -> None:
    answer = torch.arange(4000) >= 1000
    block = torch.arange(4000) // 50
    one, position = torch.ones_like(block), torch.arange(4000)
    masked, p_mask = draw(1, one, position, block, answer)
    assert not masked[:1000].any()
    assert len(p_mask.unique()) == 1
    assert masked[1000:].float().mean().item() == pytest.approx(p_mask[0].item(), abs=0.03)
    _, per_block = draw(1, one, position, block, answer, per="block")
    assert len(per_block.unique()) == 80


def test_keyed_draws_are_uniform_and_independent() -> None:
    rows, columns = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    draws = uniform(7, rows, columns)
    counts = torch.histc(draws, bins=50, min=0, max=1)
    chi2 = ((counts - 1800) ** 2 / 1800).sum().item()
    assert 20 < chi2 < 90  # 49 degrees of freedom
    for a, b in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1]), (draws, uniform(8, rows, columns))):
        pair = torch.stack((a.flatten(), b.flatten()))
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.015
    assert draws.min() >= 0 and draws.max() < 1


def test_the_loss_is_weighted_with_one_over_t_and_divided_by_the_labels() -> None:
    """Sec. 2.1 by hand, with SDAR's normaliser."""
    given, target = batch(), model("sdar")
    out = Objective(target)(given)
    labels = sum(-(-len(e.ids) // B) * B - e.prompt for e in EXAMPLES)
    assert int(given.answer.sum()) == labels
    torch.testing.assert_close(given.normaliser[given.answer], torch.full((labels,), 1 / labels))
    assert int(out.masked) == int(given.masked.sum())
    per_example = batch(normaliser="example")
    sums = [(per_example.normaliser * per_example.answer)[r].sum() for r in range(6)]
    torch.testing.assert_close(torch.stack(sums), torch.full((6,), 1 / 6))


def test_padding_is_learnt_as_the_families_do() -> None:
    sizes = sorted(len(e.ids) for e in EXAMPLES)
    longest = -(-sizes[-1] // B) * B
    assert int(batch(label_padding="none").answer.sum()) == sum(len(e.ids) - e.prompt for e in EXAMPLES)
    assert int(batch(label_padding="row").answer.sum()) == sum(longest - e.prompt for e in EXAMPLES)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("carry", [None, Residual()])
def test_both_block_layouts_give_the_same_loss(family: str, carry: Residual | None) -> None:
    target, reference = model(family), model(family, seed=9, layers=1)
    losses = [loss(Objective(target, carry=carry, reference=reference, copy=copy)) for copy in ("full", "answer")]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_does_not_change_the_loss(family: str) -> None:
    """Documents in one row do not see one another; only the order of the sum differs."""
    target = model(family)
    alone = loss(Objective(target, block_length=B))
    rows = Batches(EXAMPLES, replace(BATCHING, pack=48, total=1, device=1))
    assert len(rows.rows(0)) < len(EXAMPLES)
    rows.batching = replace(rows.batching, total=len(rows.rows(0)), device=len(rows.rows(0)))
    packed = rows.step(0, 0)[0]
    torch.testing.assert_close(loss(Objective(target, block_length=B), packed), alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("copy", ["full", "answer"])
@pytest.mark.parametrize("family", CAUSAL)
@torch.no_grad()
def test_the_training_layouts_predictions_equal_decodings(family: str, copy: str) -> None:
    """Every noisy block, read beside the clean text in one pass, against the same block behind the finished ones."""
    target, given = model(family), batch()
    objective = Objective(target, copy=copy)
    layout = objective.lay_out(objective.frame(given), given.masked)
    hidden = objective._hidden(target, layout, None)
    rows, slots = layout.source.unbind(1)
    for r in range(len(given.ids)):
        size = int((given.document[r] >= 0).sum())
        noisy = given.ids[r].masked_fill(given.masked[r], target.settings.mask_token_id)[None]
        for start in range(0, size, B):
            decoded = behind(target, given.ids[r : r + 1], noisy, start)[0]
            here = (rows == r) & (slots >= start) & (slots < start + B)
            torch.testing.assert_close(hidden[here], decoded[slots[here] - start], atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_is_trained_is_what_is_decoded(family: str) -> None:
    """The training forward with a residual equals the decoder's model call with the same residual."""
    target, given = model(family), batch()
    target.settings = replace(target.settings, attention="bidirectional")
    objective = Objective(target, carry=Residual(), reference=model(family, seed=9), block_length=B)
    objective.reference.settings = target.settings  # type: ignore[union-attr]
    state = objective._residual(objective.frame(given), given.masked, None)
    layout = objective.lay_out(objective.frame(given), given.masked)
    assert state is not None
    number, residual = state
    assert isinstance(residual, ResidualState)
    full = Residual().cold((len(given.ids), given.ids.shape[1]), target.codebook)
    alpha, delta = full.alpha, full.delta
    rows, slots = layout.source.unbind(1)
    alpha[rows, slots] = residual.alpha[number[rows, slots]]
    delta[rows, slots] = residual.delta[number[rows, slots]]
    seen = View(given.position, layout.attention)
    decoded = target(layout.ids, seen, Residual(), ResidualState(alpha, delta)).hidden[rows, slots]
    trained = objective._hidden(target, layout, ResidualState(residual.alpha, residual.delta))
    torch.testing.assert_close(trained, decoded, atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rcd_with_alpha_zero_is_seqd(family: str) -> None:
    target, reference = model(family), model(family, seed=9)
    seqd = loss(Objective(target, block_length=B))
    off = Objective(target, carry=Residual(alpha_scale=0.0), reference=reference, block_length=B)
    on = Objective(target, carry=Residual(), reference=reference, block_length=B)
    assert loss(off).item() == seqd.item()
    assert loss(on).item() != seqd.item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "neutral",
    [
        ResidualSource(dropout=0.0),
        ResidualSource(noisier=0.0),
        ResidualSource(recycling=0),
        ResidualSource(trajectory=4, trajectory_share=0.0),
        ResidualSource(codebook_gradient=True),
    ],
    ids=["dropout", "noisier", "recycling", "trajectory", "codebook_gradient"],
)
def test_each_setting_beyond_the_paper_at_its_neutral_value_is_the_papers_loss(
    family: str, neutral: ResidualSource
) -> None:
    target, reference = model(family), model(family, seed=9)
    paper = loss(Objective(target, carry=Residual(), reference=reference, block_length=B))
    assert loss(Objective(target, carry=Residual(), source=neutral, reference=reference, block_length=B)) == paper


def test_dropping_every_residual_is_seqd() -> None:
    target, reference = model("sdar"), model("sdar", seed=9)
    dropped = Objective(target, carry=Residual(), source=ResidualSource(dropout=1.0), reference=reference)
    assert loss(dropped).item() == loss(Objective(target)).item()


def test_one_recycling_pass_is_a_reference_that_equals_the_target() -> None:
    target = model("sdar")
    own = Objective(target, carry=Residual(), source=ResidualSource(recycling=1))
    drawn = {loss(own, seed=seed).item() for seed in range(8)}  # 0 passes or 1
    expected = {loss(Objective(target, carry=Residual(), reference=target)).item(), loss(Objective(target)).item()}
    assert drawn == expected
    assert loss(Objective(target, carry=Residual(), source=ResidualSource(recycling=3)), seed=1).isfinite()


def test_a_noisier_state_gives_another_residual() -> None:
    target, reference = model("sdar"), model("sdar", seed=9)
    paper = Objective(target, carry=Residual(), reference=reference)
    noisier = Objective(target, carry=Residual(), reference=reference, source=ResidualSource(noisier=0.5))
    assert loss(noisier) != loss(paper)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("carry", [None, Residual(alpha_scale=0.3)])
def test_a_trajectory_leaves_the_hard_positions_with_true_tokens_around_them(
    family: str, carry: Residual | None
) -> None:
    target, given = model(family, spread=6.0), batch()
    source = ResidualSource(trajectory=4, trajectory_share=1.0, trajectory_threshold=(0.5, 0.6))
    objective = Objective(target, carry=carry, source=source, block_length=B)
    left = []
    for seed in range(12):
        masked, weight, state = objective._trajectory(objective.frame(given), torch.Generator().manual_seed(seed))
        assert not (masked & ~given.answer).any()
        assert masked.any(-1).all()
        assert weight[masked].isfinite().all()
        left.append(int(masked.sum()))
        assert (state is None) == (carry is None or left[-1] == int(given.answer.sum()))
    assert max(left) == int(given.answer.sum()) and min(left) < max(left)
    assert loss(objective).isfinite()


def test_a_trajectory_may_begin_at_the_random_masks() -> None:
    target, given = model("llada"), batch()
    source = ResidualSource(trajectory=1, trajectory_share=1.0, trajectory_from_noise=1.0)
    objective = Objective(target, source=source, block_length=B)
    with torch.no_grad():
        begun = {}
        for seed in range(8):
            masked, _, _ = objective._trajectory(objective.frame(given), torch.Generator().manual_seed(seed))
            begun[int(masked.sum())] = masked
    rows = given.masked.any(-1)
    assert torch.equal(begun[max(begun)][rows], given.masked[rows])  # no step was taken
    assert not (begun[min(begun)][rows] & ~given.masked[rows]).any() and min(begun) < max(begun)


def test_a_slow_trajectory_commits_one_token_a_step() -> None:
    target, given = model("llada", spread=6.0), batch()
    source = ResidualSource(trajectory=1, trajectory_share=1.0, trajectory_threshold=(0.0, 0.0), trajectory_slow=1.0)
    objective = Objective(target, source=source, block_length=B)
    left = set()
    with torch.no_grad():
        for seed in range(8):
            masked, _, _ = objective._trajectory(objective.frame(given), torch.Generator().manual_seed(seed))
            left.add(tuple((given.answer.sum(-1) - masked.sum(-1)).tolist()))
    assert left == {(0,) * len(given.ids), (1,) * len(given.ids)}


def test_a_slow_trajectory_may_leave_the_masks_behind_the_end_alone() -> None:
    target, given = model("sdar", spread=6.0), batch()
    objective = Objective(target, block_length=B, source=ResidualSource(
        trajectory=3, trajectory_share=1.0, trajectory_slow=1.0, trajectory_tail=True
    ))  # fmt: skip
    tail = objective._tail(given)
    assert tail.any() and (given.ids[tail] == target.settings.eos_token_ids[0]).all()
    with torch.no_grad():
        for seed in range(8):
            masked, weight, _ = objective._trajectory(objective.frame(given), torch.Generator().manual_seed(seed))
            assert masked[tail].all() and (masked & ~tail).any(-1).all() and weight.isfinite().all()


def test_gradients_reach_the_target_and_never_the_reference() -> None:
    target, reference = model("sdar"), model("sdar", seed=9)
    loss(Objective(target, carry=Residual(), reference=reference)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in target.parameters())
    assert all(p.grad is None for p in reference.parameters())


def test_the_codebooks_gradient_through_delta_is_a_choice() -> None:
    reference, grads = model("sdar", seed=9), []
    for flows in (False, True):
        target = model("sdar")
        source = ResidualSource(codebook_gradient=flows)
        loss(Objective(target, carry=Residual(), reference=reference, source=source)).backward()
        grads.append(target.codebook.grad)
    assert not torch.allclose(grads[0], grads[1])  # type: ignore[arg-type]


def test_a_reference_may_be_smaller_and_have_another_padded_vocabulary() -> None:
    target = model("sdar")
    reference = model("sdar", seed=9, width=32, layers=1, vocab=160)
    reference.settings = replace(reference.settings, mask_token_id=target.settings.mask_token_id)
    assert loss(Objective(target, carry=Residual(), reference=reference)).isfinite()


def test_nothing_of_the_size_of_batch_times_length_times_vocabulary_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest fp32 tensor that is made has a chunk's rows, not the batch's."""
    from rcd.train import loss as module

    seen: list[int] = []
    plain = torch.Tensor.float

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.dim() >= 2 and tensor.shape[-1] == 128:
            seen.append(tensor.numel() // 128)
        return plain(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", spy)
    monkeypatch.setattr(module, "LOGITS", 4 * 128)
    target, reference = model("sdar"), model("sdar", seed=9)
    loss(Objective(target, carry=Residual(), reference=reference)).backward()
    assert seen and max(seen) <= 4 < int(batch().masked.sum())


@pytest.mark.parametrize("padding", ["block", "row", "none"])
@pytest.mark.parametrize("normaliser", ["labels", "example"])
@pytest.mark.parametrize(
    "source", [ResidualSource(dropout=0.5, noisier=0.3), ResidualSource(trajectory=5, trajectory_share=1.0)]
)
def test_the_loss_does_not_depend_on_how_a_step_is_split(padding: str, normaliser: str, source: ResidualSource) -> None:
    target = model("llada", spread=6.0)
    objective = Objective(target, block_length=B, carry=Residual(), reference=model("llada", seed=9))
    objective.source = source
    losses = []
    for device, processes in ((6, 1), (1, 1), (2, 2), (4, 4)):
        batches = Batches(EXAMPLES, replace(BATCHING, device=device, label_padding=padding, normaliser=normaliser))
        parts = [batch for process in range(processes) for batch in batches.step(0, 0, process, processes)]
        assert len({len(batches.step(0, 0, process, processes)) for process in range(processes)}) == 1
        whole = sum(int(batch.answer.sum()) for batch in parts)
        assert whole == sum(int(batch.answer.sum()) for batch in batches.step(0, 0))
        losses.append(sum(loss(objective, batch).item() for batch in parts))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_rows_may_be_longer_than_their_answers_by_a_draw_of_the_step() -> None:
    lengths = set()
    for epoch in range(20):
        plain = Batches(EXAMPLES, replace(BATCHING, label_padding="row")).step(epoch, 0)[0]
        padded = Batches(EXAMPLES, replace(BATCHING, label_padding="row", row_padding=2 * B)).step(epoch, 0)[0]
        more = padded.ids.shape[1] - plain.ids.shape[1]
        lengths.add(more)
        assert padded.answer[:, plain.ids.shape[1] :].all()
    assert lengths == {0, B, 2 * B}


def test_too_few_rows_for_a_step_are_refused() -> None:
    with pytest.raises(RCDError, match="total_batch = 7 rows, and the data gives 6"):
        Batches(EXAMPLES, replace(BATCHING, total=7))


def test_an_examples_noise_depends_on_nothing_but_itself() -> None:
    everything = Batches(EXAMPLES, BATCHING).step(0, 0)[0]
    halves = [Batches(EXAMPLES, replace(BATCHING, device=3)).step(0, 0, process, 2)[0] for process in (0, 1)]
    for half, start in zip(halves, (0, 1), strict=True):
        for k, name in enumerate(half.names):
            r = everything.names.index(name)
            assert r == start + 2 * k
            width = half.ids.shape[1]
            assert torch.equal(half.masked[k], everything.masked[r, :width])
            size = int((half.document[k] >= 0).sum())
            assert torch.equal(half.weight[k, :size], everything.weight[r, :size])
    other = Batches(EXAMPLES, BATCHING).step(1, 0)[0]
    assert other.names != everything.names
