"""Interchange interventions in every family: which states are swapped, and that all others stay."""

from __future__ import annotations

import pytest
import torch

from lmtool.distillation.interchange import (
    Site,
    Swap,
    Swapped,
    interventions,
    member_batches,
    record_interchange_states,
    swapping_tap,
)
from lmtool.distillation.recording import RecordedStates
from lmtool.learners.mixed_examples import combine
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.nn.stack import Stack, Tap, TapPoint
from lmtool.types import Batch, Packed
from tests.models.test_read import FAMILIES, LENGTHS, packed
from tests.models.test_taps import of_family


def batch_of(*lengths, examples=None, outputs=None):
    numbers = torch.arange(len(lengths)) if examples is None else torch.tensor(examples)
    sides = [
        None if side is None else Packed(torch.zeros(sum(side), dtype=torch.int64), side) for side in (lengths, outputs)
    ]
    return Batch(sides[0], {}, numbers, numbers * 0, sides[1])


def documents(swap, packed):
    return [
        (int(packed.documents[to]), int(packed.documents[at])) for to, at in zip(swap.to_S, swap.from_S, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_source_equal_to_base_changes_nothing(family):
    """Bit for bit, with dropout, whether or not the layers below the swap are skipped."""
    backbone, outputs = of_family(family)
    sites = [Site(side, 1, 1) for side in ("inputs", *outputs)]
    examples = torch.arange(len(LENGTHS))
    keys = [token_keys(0, 1, examples, examples * 0, packed(1), outputs=side) for side in (False, True)]

    def run(own, tap=None):
        for stack in stacks(backbone):
            stack.tap = own
        return backbone(packed(1), TokenRng(*keys), **outputs, tap=tap)

    kept = record_interchange_states(backbone.config.depths, sites, teacher=False)
    plain, seen = run(None), run(kept)
    assert torch.equal(plain, seen)
    same, other = torch.arange(3, 9), torch.arange(13, 19)
    for place in [site.point(False) for site in sites]:
        for source, changed in ((same, False), (other, True)):
            swaps = [{place: Swap(same, source)}, {place: Swap(same, source)}]
            intervened = run(Swapped(kept, swaps))
            assert torch.equal(intervened, plain) != changed
            kept.states = {place: [*states, *states] for place, states in kept.states.items()}
            # Beside another tap all layers are computed.
            tap = Swapped(kept, swaps)
            assert torch.equal(run(tap, Tap()), intervened)
            kept.states = {place: states[:1] for place, states in kept.states.items()}


def stacks(backbone):
    return [module for module in backbone.modules() if isinstance(module, Stack)]


def test_sources_differ_from_bases_and_depend_on_the_step():
    batch = batch_of(*[10] * 40)
    plan = interventions(batch, [Site("inputs", 1, 1)], 0.3, seed=3, step=7)
    swap = plan.swaps[0]
    pairs = documents(swap, batch.inputs)
    assert plan.swapped_texts == 40 and len(pairs) == 40 * 3
    assert all(base != source for base, source in pairs) and {base for base, _ in pairs} == set(range(40))
    assert len({source for _, source in pairs}) > 20
    # Consecutive positions, the same in base and source.
    assert torch.equal(batch.inputs.positions[swap.to_S], batch.inputs.positions[swap.from_S])
    assert (batch.inputs.positions[swap.to_S].view(40, 3).diff(dim=1) == 1).all()
    assert set(batch.inputs.positions[swap.to_S].tolist()) == set(range(10))
    again, later = (interventions(batch, [Site("inputs", 1, 1)], 0.3, seed=3, step=step) for step in (7, 8))
    assert torch.equal(again.swaps[0].from_S, swap.from_S) and not torch.equal(later.swaps[0].from_S, swap.from_S)


def test_span_length_follows_the_shorter_text():
    batch = batch_of(1, 9, 4, 20)
    for step in range(30):
        swap = interventions(batch, [Site("inputs", 1, 1)], 0.5, 0, step).swaps[0]
        for base in range(4):
            own = batch.inputs.documents[swap.to_S] == base
            (source,) = batch.inputs.documents[swap.from_S][own].unique().tolist()
            shorter = min(batch.inputs.lengths[base], batch.inputs.lengths[source])
            assert own.sum() == max(round(0.5 * shorter), 1)


def test_every_example_is_swapped_at_one_site():
    sites = [Site("inputs", 1, 2), Site("inputs", 2, 4), Site("outputs", 1, 2)]
    plan = interventions(batch_of(*[8] * 30, outputs=(5,) * 30), sites, 1.0, 0, 1)
    assert set(plan.swaps) == {0, 1, 2} and plan.swapped_texts == 30
    assert sum(len(plan.swaps[number].to_S) for number in (0, 1)) // 8 + len(plan.swaps[2].to_S) // 5 == 30
    # Student layers that are aligned with the same teacher layer swap at one point of the teacher.
    merged_sites = [Site("inputs", 1, 2), Site("inputs", 2, 2), sites[2]]
    merged = swapping_tap(RecordedStates([]), [plan], merged_sites, teacher=True)
    assert len(merged.swaps[0][TapPoint(2)].to_S) == sum(len(plan.swaps[number].to_S) for number in (0, 1))


def test_single_text_is_not_swapped():
    plan = interventions(batch_of(8), [Site("inputs", 1, 1)], 0.5, 0, 1)
    assert plan.swapped_texts == 0 and not plan.swaps


def test_mixture_members_swap_separately():
    mixed = combine([("a", batch_of(3, 4)), ("b", batch_of(5))])
    assert [len(part.inputs.lengths) for part in member_batches(mixed)] == [2, 1]


def test_only_the_configured_dimensions_are_swapped():
    kept = RecordedStates([TapPoint(1)])
    states = torch.arange(24.0).view(4, 6)
    kept(TapPoint(1), states)
    tap = Swapped(kept, [{TapPoint(1): Swap(torch.tensor([0]), torch.tensor([3]))}], (0.5, 1.0))
    first, given = tap.begin("inputs")
    changed = tap(TapPoint(1), given)
    assert first == 1 and changed[0].tolist() == [0, 1, 2, 21, 22, 23] and torch.equal(changed[1:], states[1:])
