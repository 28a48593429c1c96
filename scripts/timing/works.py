"""The tables of `make bench`, with their variants and comparisons.

A variant is a process of worker.py. The Trainer runs as in transformers' example scripts (*documented*), and with the
options that its documentation recommends for speed (*tuned*): batches of similar length, a process that collates, and
packing without padding where the model supports it. Padding to multiples of 8 is used on GPUs only: on a CPU it was
slower (111 instead of 125 examples a second at SST-2's lengths). All compute in the run's precision, with the fused
AdamW and scaled dot-product attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

MEMORY_AIM = 0.7
PRODUCTS = "products"
"""The variant that multiplies matrices, to measure the machine in each round."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
# The sampler sorts 50 batches at a time by length: fewer steps would time only long batches or only short ones.
GROUPED_STEPS = 50


@dataclass(frozen=True)
class Variant:
    """A row of a table. name: begins with trainer, pipeline, transformers or lmtool. options: see worker.py. steps: of
    a turn, if not the common number. every: rounds between its turns. shared: it runs in one process with the other
    shared variants of its side."""

    name: str
    label: str
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    steps: int | None = None
    every: int = 1
    shared: bool = False

    @property
    def own(self) -> bool:
        return self.name.startswith("lmtool")


@dataclass(frozen=True)
class Comparison:
    """A variant of lmtool compared with a rival's. aim: the smallest acceptable ratio of speeds. same: both read the
    same examples in the same order in each turn, and one step (of the tables with `use`: the results) of both is
    compared before they are timed."""

    own: str
    rival: str
    aim: float | None = None
    same: bool = False


@dataclass(frozen=True)
class Work:
    """A table. unit: the key of a turn's row that is counted per second. settings: overrides of `settings_of`.
    share_aim: fraction of the machine's matrix products that lmtool's last variant should reach. notes: printed below
    the table."""

    name: str
    title: str
    unit: str
    variants: tuple[Variant, ...]
    comparisons: tuple[Comparison, ...]
    settings: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    share_aim: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[Variant, ...]:
        return tuple(variant for variant in self.variants if variant.own)

    @property
    def rivals(self) -> tuple[Variant, ...]:
        return tuple(variant for variant in self.variants if not variant.own)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)


def settings_of(**changes: Any) -> dict[str, Any]:
    """The settings of all workers; a work's settings override them."""
    return {
        "seed": 0, "threads": 1, "device": "cpu", "precision": "fp32", "family": "bert", "max_length": 128, "texts": [],
        "task": None, "use": None, "corpus_bytes": 3_000_000, "rows": 0, "batch": 16, "lr": 1e-4, "weight_decay": 0.01,
        "clip_norm": 1.0, "rounds": 10, "turn_seconds": 5.0, "most_steps": 18,
        "model": {
            "vocab_size": 30522, "num_layers": 4, "hidden_size": 256, "num_heads": 4, "feedforward_size": 1024,
            "max_positions": 512, "dropout": 0.1, "attention_dropout": 0.1,
        },
        **changes,
    }  # fmt: skip


def labeled(kind: str, **lengths: float) -> dict[str, Any]:
    """A task on texts with this distribution of lengths."""
    return {"kind": kind, "max_length": lengths["largest"], "lengths": lengths}


TUNED = {"workers": 1}
FINETUNED = Variant("lmtool_finetune", "lmtool finetune", {"rows": "task"})
PADDED = Variant("trainer_padded", "Trainer, padded to the longest of the batch", {"rows": "task"})
# Batches of similar length. Their turns are long, hence only in every second round.
GROUPED, GROUPED_TUNED = (
    Variant(name, label, {"rows": "task", "grouped": True, **options}, GROUPED_STEPS, every=2)
    for name, label, options in (
        ("trainer_grouped", "Trainer, group_by_length", {}),
        ("trainer_grouped_tuned", "Trainer, group_by_length, tuned", TUNED),
    )
)
LINES = Variant("trainer_lines", "Trainer, a text a line, padded to the longest of the batch", {"rows": "separate"})
GROUP_TEXTS = "Trainer, texts joined into rows of 128 (group_texts)"


def maximum(length: int, script: str) -> Variant:
    label = f"Trainer, padded to {length} ({script}'s default)"
    return Variant("trainer_maximum", label, {"rows": "task", "padding": length})


def classification(name: str, title: str, rows: int, over_grouped: float, **lengths: float) -> Work:
    """A table of finetuning on texts of these lengths. over_grouped: aim over batches of similar length."""
    return Work(
        name,
        title,
        "examples",
        (maximum(128, "run_glue"), PADDED, GROUPED, GROUPED_TUNED, FINETUNED),
        (
            Comparison("lmtool_finetune", "trainer_maximum", aim=4.0, same=True),
            Comparison("lmtool_finetune", "trainer_padded", same=True),
            Comparison("lmtool_finetune", "trainer_grouped", aim=over_grouped),
            Comparison("lmtool_finetune", "trainer_grouped_tuned", aim=over_grouped),
        ),
        {"batch": 32, "rows": rows, "task": labeled("classification", **lengths)},
    )


@dataclass(frozen=True)
class Case:
    """What is asked of a trained model, as a row of lmtool and a row of each rival. same: the results are equal."""

    name: str
    label: str
    options: Mapping[str, Any]
    steps: int
    aim: float | None = None
    same: bool = True


def use(
    name: str, title: str, unit: str, own: str, rivals: Mapping[str, str], cases: tuple[Case, ...],
    settings: Mapping[str, Any], *notes: str,
) -> Work:  # fmt: skip
    """A table of a trained model in use, in fp32, with a process for each side. own and rivals: the first words of
    labels, by the option `loop` of a rival."""
    variants, comparisons = list[Variant](), list[Comparison]()
    for case in cases:
        ours = Variant(f"lmtool_use_{case.name}", f"{own}, {case.label}", case.options, case.steps, shared=True)
        variants.append(ours)
        for number, (loop, label) in enumerate(rivals.items()):
            rival = f"transformers_{case.name}{f'_{loop}' if number else ''}"
            options = {**case.options, "loop": loop}
            variants.append(Variant(rival, f"{label}, {case.label}", options, case.steps, shared=True))
            comparisons.append(Comparison(ours.name, rival, case.aim, case.same))
    memory = "Each side runs in one process, whose peak memory is that of its largest row."
    return Work(
        name, title, unit, tuple(variants), tuple(comparisons),
        {"use": name, "precision": "fp32", "corpus_bytes": 1_000_000, **settings}, notes=(memory, *notes),
    )  # fmt: skip


DECODER: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 8192, "num_layers": 6, "hidden_size": 384, "num_heads": 6, "feedforward_size": 1536,
})  # fmt: skip
"""The model whose texts, and scores of candidates, are timed."""
SIZES = "The model has 6 layers of width 384 and 8,192 entries in fp32"


def generated(
    name: str, label: str, at_once: int, steps: int, aim: float | None, same: bool = True, **more: Any
) -> Case:
    return Case(name, label, {"texts": "gpt", "at_once": at_once, "new": 32, **more}, steps, aim, same)


WORKS = (
    Work(
        "masked_lm",
        "Masked LM, documents of natural length cut at 128 tokens, 16 of them or 2,048 tokens a step",
        "tokens",
        (
            LINES,
            Variant("trainer_packed", GROUP_TEXTS, {"rows": "group_texts"}),
            Variant("trainer_packed_tuned", "Trainer, group_texts, tuned", {"rows": "group_texts", **TUNED}),
            Variant("lmtool_texts", "lmtool pretrain, batch_examples=16", {"rows": "separate"}),
            Variant("lmtool_tokens", "lmtool pretrain, batch_tokens=2048", {"rows": "separate", "batch_tokens": 2048}),
        ),
        (
            Comparison("lmtool_texts", "trainer_lines", aim=8.0, same=True),
            Comparison("lmtool_tokens", "trainer_packed", aim=4.0),
            Comparison("lmtool_tokens", "trainer_packed_tuned", aim=4.0),
            Comparison("lmtool_texts", "trainer_packed"),
        ),
        {"texts": ["separate"]},
        share_aim=0.65,
        notes=("A step of group_texts has 2,048 tokens, and so has lmtool's with batch_tokens=2048.",),
    ),
    Work(
        "causal_lm",
        "Causal LM, documents of natural length cut at 128 tokens, 16 rows a step",
        "tokens",
        (
            LINES,
            Variant("trainer_packed", GROUP_TEXTS, {"rows": "joined"}),
            Variant(
                "trainer_flattened",
                "Trainer, a text a line, tuned: without padding (DataCollatorWithFlattening)",
                {"rows": "separate", "flattened": True, **TUNED},
            ),
            Variant("trainer_packed_tuned", "Trainer, group_texts, tuned", {"rows": "joined", **TUNED}),
            Variant("lmtool_separate", "lmtool pretrain, data.documents=separate", {"rows": "separate"}),
            Variant("lmtool_joined", "lmtool pretrain, data.documents=joined", {"rows": "joined"}),
        ),
        (
            Comparison("lmtool_separate", "trainer_lines", aim=1.3, same=True),
            Comparison("lmtool_joined", "trainer_packed", aim=1.1, same=True),
            Comparison("lmtool_separate", "trainer_flattened"),
            Comparison("lmtool_joined", "trainer_packed_tuned", aim=1.1),
        ),
        {"family": "gpt", "texts": ["separate", "joined"]},
        notes=("The Trainer divides a causal loss by one label a row too many, which the check puts right.",),
    ),
    classification(
        "sst2", "Classification at SST-2's lengths, at most 66 tokens, batches of 32 examples",
        14_400, 1.25, median=22.0, sigma=0.5, smallest=4, largest=66,  # nine times what the sampler sorts at once
    ),
    classification(
        "mnli", "Classification at MNLI's lengths, at most 128 tokens, batches of 32 examples",
        9_600, 1.8, median=35.5, sigma=0.5, smallest=6, largest=128,
    ),
    Work(
        "squad",
        "Answers as spans at SQuAD's lengths, windows of at most 384 tokens, 12 of them a step",
        "examples",
        (maximum(384, "run_qa"), PADDED, GROUPED_TUNED, FINETUNED),
        (
            Comparison("lmtool_finetune", "trainer_maximum", same=True),
            Comparison("lmtool_finetune", "trainer_padded", same=True),
            Comparison("lmtool_finetune", "trainer_grouped_tuned"),
        ),
        {
            "batch": 12, "rows": 2_400,
            "task": labeled("extractive_qa", median=166.0, sigma=0.36, smallest=48, largest=384),
        },
        notes=("The Trainer's loss of a span runs over padding too, so the same step is checked on a single window.",),
    ),
    Work(
        "prediction",
        "Prediction of classes, texts of natural length cut at 128 tokens, 128 at a time",
        "examples",
        (
            Variant("pipeline_single", "pipeline, a text at a time (its default)", {"at_once": 1}),
            Variant("pipeline_batched", "pipeline, batch_size=32", {"at_once": 32}),
            Variant("lmtool_prediction", "lmtool predict"),
        ),
        (
            Comparison("lmtool_prediction", "pipeline_single", aim=2.0),
            Comparison("lmtool_prediction", "pipeline_batched", aim=2.0),
        ),
    ),
    use(
        "generate", "Generated texts, prompts of 8 to 16 tokens, 32 new tokens each", "tokens",
        "lmtool generate", {"padded": "transformers generate"},
        (
            generated("greedy_1", "greedy, one prompt", 1, 6, 1.5),
            generated("greedy_16", "greedy, 16 prompts", 16, 3, 2.0),
            generated("greedy_64", "greedy, 64 prompts", 64, 2, None),
            generated("beams_1", "four beams, one prompt", 1, 4, 2.0, beams=4),
            generated("beams_8", "four beams, 8 prompts", 8, 2, 2.0, beams=4),
            generated("sampled_16", "sampled from the 50 best, 16 prompts", 16, 3, 2.0, same=False, top_k=50),
            generated("t5_16", "T5, greedy, 16 prompts", 16, 3, 2.0, texts="t5"),
            generated("bart_16", "BART, greedy, 16 prompts", 16, 3, 2.0, texts="bart"),
        ),
        {"family": "gpt", "texts": ["gpt", "t5", "bart"], "model": DECODER},
        f"{SIZES}, a GPT-2 unless the row names another, with random weights.",
        "Sampled tokens differ between the sides: only their number "
        "is the same.",
    ),
    use(
        "embed", "Vectors of texts, questions of about 12 tokens and paragraphs of about 100", "texts",
        "lmtool embed", {"padded": "sentence-transformers"},
        tuple(
            Case(f"{texts}_{at_once}", f"{texts}, {label}", {"texts": texts, "at_once": at_once}, steps, 2.0)
            for texts, at_once, label, steps in (
                ("questions", 1, "one at a time", 48), ("questions", 128, "128 at a time", 4),
                ("paragraphs", 1, "one at a time", 32), ("paragraphs", 128, "128 at a time", 2),
            )
        ),
        {"texts": ["questions", "paragraphs"]},
        "The vectors are normalized means over the tokens of a BERT with random weights, in fp32.",
    ),
    use(
        "shots", "Scores of two candidates after 8 examples in the prompt, 32 rows at a time", "candidates",
        "lmtool evaluate shots=8",
        {
            "padded": "transformers, batches of 16 padded texts",
            "kept": "transformers, batches of 16 padded texts, logits only of candidates (logits_to_keep)",
        },
        (Case("shots", "32 rows", {"texts": "rows", "at_once": 32}, 1),),
        {
            "family": "gpt", "texts": ["rows"], "model": DECODER, "rows": 240,
            "task": labeled("classification", median=22.0, sigma=0.5, smallest=4, largest=66),
        },
        f"{SIZES}, a GPT-2 with random weights.",
        "lmtool reads the examples of the prompt once, and transformers before each candidate.",
    ),
)  # fmt: skip


BASE_MODEL: Mapping[str, Any] = MappingProxyType({
    "num_layers": 12, "hidden_size": 768, "num_heads": 12, "feedforward_size": 3072,
})  # fmt: skip
"""The sizes that BERT-base and GPT-2 small share, for `--sizes base`."""


def base(name: str, title: str, variants: tuple[str, ...], **settings: Any) -> Work:
    """A table of pretraining at `BASE_MODEL` sizes: some of the variants, half the batch, no aims."""
    work = next(work for work in WORKS if work.name == name)
    present = [work.variant(variant) for variant in variants]
    return replace(
        work,
        name=f"{name}_base",
        title=title,
        variants=tuple(
            replace(variant, label=variant.label.replace("batch_examples=16", "batch_examples=8"))
            for variant in present
        ),
        comparisons=tuple(
            replace(pair, aim=None) for pair in work.comparisons if pair.own in variants and pair.rival in variants
        ),
        settings={**work.settings, "batch": 8, **settings},
        share_aim=None,
        notes=work.notes if name == "causal_lm" else (),
    )


BASE_WORKS = (
    base(
        "masked_lm", "BERT-base, masked LM, documents of natural length cut at 128 tokens, 8 rows a step",
        ("trainer_lines", "trainer_packed", "lmtool_texts"),
    ),
    base(
        "causal_lm", "GPT-2 small (V50257), causal LM, documents of natural length cut at 128 tokens, 8 rows a step",
        ("trainer_lines", "trainer_packed", "lmtool_separate", "lmtool_joined"),
        model={"vocab_size": 50257, "max_positions": 1024},
    ),
)  # fmt: skip
