"""Compares a converted checkpoint with the original (tensors, hidden states, logits, token ids), and the tokenizer of
an exported folder with transformers' AutoTokenizer.

Shape letters: B rows, L their padded length in tokens, T tokens, H hidden width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from lmtool.errors import CheckFailed
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.nn.stack import Tap, TapPoint
from lmtool.system.terminal import listing
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed
from lmtool.weights.folders import read_settings
from lmtool.weights.saved_model import CheckpointModel

ADVERSARIAL = (
    "",
    " ",
    "  two  spaces ",
    "\n\n\t",
    "Hello, World! It's 3.14; don't.",
    "ÀÉÎÕÜ naïve café Ångström",
    "İstanbul ẞ ﬁ ǅ",
    "e\u0301 n\u0303 \u0301 combining",
    "中文字 日本語 かな 한국어",
    "ไทย עברית العربية हिन्दी",
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f600",
    "zero\u200bwidth\u200d\ufeff",
    "control \x00\x01\x07\x7f\x85 \ufffd",
    "nbsp\u00a0wide\u3000line\u2028",
    "a" * 500,
    "字" * 200,
    "½ ² Ⅷ ① ｆｕｌｌ ١٢٣",
    "[CLS] [SEP] [MASK] [PAD] [UNK]",
    "<s> </s> <pad> <unk> <mask>",
    "<|endoftext|> <extra_id_0>",
    "##ing ▁the Ġthe </w>",
    "x=y+z; #include <stdio.h> https://a.b/c?d=e&f=%20",
    "``quoted'' “curly” ‘single’ … —",
    "\U0010ffff \ue000 soft\u00adhyphen",
)
"""Strings on which tokenizers are known to differ."""


ROUNDING_TOLERANCE = 1e-5
"""Tolerance, relative to the largest value, between two computations by lmtool. They may round differently: the last
layer computes only the tokens whose states are read, and an adapter of joined projections has other factors."""
LIBRARY_TOLERANCE = 1e-3
"""Tolerance, relative to the largest value, for outputs of another library, which computes in another order."""


@dataclass
class CheckpointComparison:
    """Differences between an original checkpoint and a copy.

    Attributes:
        tensor_differences: Largest difference of each tensor that both checkpoints have, by name.
        missing: Names of the original's tensors that the copy does not have.
        unused: Names of tensors in the copy's file that were not read.
        tied: Names of tensors that are shared, as "name = other name".
        layer_differences: Largest difference of the hidden states after each layer, on a sample of random tokens. Here
            and below, differences are relative, see `relative_difference`.
        logits_difference: Largest difference of the logits on this sample, or None without logits.
        pair_logits_difference: Largest difference of the logits of a head over text pairs, or None without such a head.
        prediction_differences: Largest difference of the predictions for "texts" and for "pairs"; infinite if
            a text is encoded to other tokens or segments.
        differing_strings: The strings of `ADVERSARIAL` that are encoded to other token ids.
        strings_compared: Number of strings that were compared.
    """

    tensor_differences: dict[str, float]
    missing: list[str]
    unused: list[str]
    tied: list[str] = field(default_factory=list)
    layer_differences: dict[str, float] = field(default_factory=dict)
    logits_difference: float | None = None
    pair_logits_difference: float | None = None
    prediction_differences: dict[str, float] = field(default_factory=dict)
    differing_strings: list[str] = field(default_factory=list)
    strings_compared: int = 0

    @property
    def same(self) -> bool:
        """Whether tensors, hidden states, logits and token ids are equal, and predictions equal within
        `ROUNDING_TOLERANCE`."""
        numbers = [
            *self.tensor_differences.values(),
            *self.layer_differences.values(),
            self.logits_difference or 0.0,
            self.pair_logits_difference or 0.0,
        ]
        # NaN counts as a difference.
        equal = all(number == 0.0 for number in numbers) and all(
            number < ROUNDING_TOLERANCE for number in self.prediction_differences.values()
        )
        return equal and not self.missing and not self.differing_strings

    def rows(self) -> list[tuple[str, str]]:
        """Returns labels and values for the screen."""
        largest = max(self.tensor_differences.values(), default=0.0)
        worst = sorted(self.tensor_differences.items(), key=lambda item: -item[1])[:3]
        changed = [f"{name} {value:.2g}" for name, value in worst if value > 0]
        rows = [
            ("tensors", f"{len(self.tensor_differences)} · largest difference {largest:.3g}"),
            *(("changed", change) for change in changed),
            ("missing keys", _count_and_names(self.missing)),
            ("unused keys", _count_and_names(self.unused)),
            ("tied weights", _count_and_names(self.tied)),
        ]
        if self.layer_differences:
            differences = " · ".join(f"{name} {value:.3g}" for name, value in self.layer_differences.items())
            rows.append(("layers", f"largest differences on a sample: {differences}"))
        rows.append(
            ("logits", "none" if self.logits_difference is None else f"largest difference {self.logits_difference:.3g}")
        )
        if self.pair_logits_difference is not None:
            rows.append(("pair logits", f"largest difference {self.pair_logits_difference:.3g}"))
        if self.prediction_differences:
            differences = " · ".join(f"{kind} {value:.3g}" for kind, value in self.prediction_differences.items())
            rows.append(("as read", f"largest differences, tokenized by the folder's files: {differences}"))
        if self.strings_compared:
            text = f"{len(self.differing_strings)} of {self.strings_compared} adversarial strings get other ids"
            rows.append(("tokenizer", text + (f": {self.differing_strings[0]!r}" if self.differing_strings else "")))
        return rows


def _count_and_names(names: list[str]) -> str:
    return f"{len(names)}: {listing(names, 6)}" if names else "none"


def compare_tensors(
    original: Mapping[str, Tensor], copy: Mapping[str, Tensor], unused: list[str]
) -> CheckpointComparison:
    """Compares the tensors of two checkpoints by name. `unused` lists tensors in the copy's file that were not read."""
    differences = {
        name: difference(tensor, copy[name])
        for name, tensor in original.items()
        if name in copy and copy[name].shape == tensor.shape
    }
    return CheckpointComparison(differences, [name for name in original if name not in differences], unused)


@torch.no_grad()
def compare_outputs(comparison: CheckpointComparison, original: CheckpointModel, copy: CheckpointModel) -> None:
    """Runs both models on a sample of random tokens, with two segments if the model has segments. Records the
    differences of each layer's hidden states and of the logits in `comparison`."""
    backbone = original.backbone
    vocab_size, longest = backbone.config.vocab_size, min(backbone.config.max_positions, 24)
    # Multiples of a prime, so that tokens are spread over the vocabulary; two documents of different length.
    tokens = torch.arange(2 * longest - 5, dtype=torch.int64) * 7919 % vocab_size
    has_segments = backbone.config.segment_types > 1
    columns = {"segment": torch.arange(len(tokens)) % longest // (longest // 2 + 1)} if has_segments else {}
    sample = Packed(tokens, (longest, longest - 5), columns)
    outputs = Packed(tokens.flip(0), sample.lengths) if isinstance(backbone, EncoderDecoder) else None
    read_by_heads = sample if outputs is None else outputs
    results: list[tuple[dict[str, Tensor], Tensor | None, Tensor | None]] = []
    for model in (original.eval(), copy.eval()):
        layers = _LayerStates()
        hidden_TH = model.hidden(sample, outputs, tap=layers)
        logits = model.logits(hidden_TH, read_by_heads), model.pair_logits(hidden_TH, read_by_heads)
        results.append((layers.states | {"hidden": hidden_TH}, *logits))
    (states, *original_logits), (copied_states, *copied_logits) = results
    comparison.layer_differences = {
        name: relative_difference(tensor, copied_states[name]) for name, tensor in states.items()
    }
    comparison.logits_difference, comparison.pair_logits_difference = (
        relative_difference(logits, copied) if logits is not None and copied is not None else None
        for logits, copied in zip(original_logits, copied_logits, strict=True)
    )


def compare_tokenizers(comparison: CheckpointComparison, original: Tokenizer, copy: Tokenizer) -> None:
    """Records in `comparison` which strings of `ADVERSARIAL` the two tokenizers encode differently."""
    comparison.differing_strings = different_ids(original, copy)
    comparison.strings_compared = len(ADVERSARIAL)


def different_ids(original: Tokenizer, copy: Tokenizer) -> list[str]:
    """Returns the strings of `ADVERSARIAL` that the two tokenizers encode differently. They are compared with and
    without parsing special tokens in texts, because a folder and a checkpoint may differ in this setting."""
    ids = [
        [tokenizer.with_parsing(parse).encode_batch(ADVERSARIAL) for parse in (False, True)]
        for tokenizer in (original, copy)
    ]
    return [
        text
        for number, text in enumerate(ADVERSARIAL)
        if any(expected[number].tolist() != actual[number].tolist() for expected, actual in zip(*ids, strict=True))
    ]


def tied_names(model: CheckpointModel) -> list[str]:
    """Returns a description of each shared tensor, including output layers that are tied to the token embedding, as
    "name = other name"."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.append(f"{name} = {first[id(parameter)]}")
        first.setdefault(id(parameter), name)
    for name, head in model.heads.items():
        if isinstance(head, LMHead) and head.output is None:
            tied.append(f"heads.{name} = backbone.embed.token.weight")
    return tied


class _LayerStates(Tap):
    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        self.states[f"{point.side} {point.layer}"] = x_TH
        return x_TH


def difference(tensor: Tensor, other: Tensor) -> float:
    """Returns the largest absolute difference of two tensors; infinite if their shapes differ."""
    if tensor.shape != other.shape:
        return float("inf")
    if not tensor.numel():
        return 0.0
    return float((tensor.double() - other.double()).abs().max())


def relative_difference(tensor: Tensor, other: Tensor) -> float:
    """Returns `difference` divided by the largest absolute value of the first tensor, or by 1 if this is larger."""
    return difference(tensor, other) / max(1.0, float(tensor.abs().max()))


def same_tensors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> bool:
    """Returns whether two checkpoints have equal tensors under the same names."""
    return expected.keys() == actual.keys() and all(tensor.equal(actual[name]) for name, tensor in expected.items())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences the warnings and progress bars of transformers inside the context."""
    from transformers.utils import logging

    verbosity, progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bars:
            logging.enable_progress_bar()


def tokenize_as_transformers(
    folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Returns the result of `AutoTokenizer.from_pretrained(folder)(texts, pairs, padding=True, truncation=True,
    return_tensors="pt")` without importing transformers: int64 tensors, (B, L), by the names in the folder's
    `model_input_names`. The folder must name a generic tokenizer class. pairs: the second text of each pair."""
    settings = read_settings(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    backend.enable_truncation(settings["model_max_length"])
    pad = settings.get("pad_token")
    backend.enable_padding(pad_id=backend.token_to_id(pad) if pad else 0, pad_token=pad or "")
    encoded = backend.encode_batch(list(texts) if pairs is None else list(zip(texts, pairs, strict=True)))
    columns = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
    return {
        name: torch.tensor([getattr(row, columns[name]) for row in encoded]) for name in settings["model_input_names"]
    }


def compare_autotokenizer(folder: Path, tokenizer: Tokenizer) -> str:
    """Checks that AutoTokenizer encodes unusual strings, texts and pairs in an exported folder as lmtool's tokenizer
    does. Returns one line for the screen. Raises CheckFailed if it does not, or cannot read the folder."""
    if find_spec("transformers") is None:
        return "AutoTokenizer: not compared, transformers is not installed"
    # Imported here because it takes seconds and is optional.
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():  # transformers warns if a text exceeds the model's length
            reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            special = tokenizer.pieces(sorted(tokenizer.special_ids))
            texts = [*ADVERSARIAL, *(f"a {token} b{token}c  {token}" for token in special)]
            parses_special = not read_settings(folder).get("split_special_tokens")
            ids = [row.tolist() for row in tokenizer.with_parsing(parses_special).encode_batch(texts)]
            results = {"strings": (ids, reference(texts, add_special_tokens=False)["input_ids"])}
            for kind, columns in (("texts", (texts,)), ("pairs", (texts, texts[::-1]))):
                rows = tokenize_as_transformers(folder, *columns)
                real = rows["attention_mask"].bool()
                for name, expected in reference(*columns, truncation=True).items():
                    actual = [row[mask].tolist() for row, mask in zip(rows[name], real, strict=True)]
                    results[f"{name} of {kind}"] = (actual, expected)
    except Exception as problem:  # transformers raises many kinds of errors
        raise CheckFailed(
            f"{folder}: AutoTokenizer cannot read the folder: {problem}", "keep the checkpoint, and report this"
        ) from problem
    for kind, (actual, expected) in results.items():
        different = [text for text, *rows in zip(texts, actual, expected, strict=True) if rows[0] != rows[1]]
        if different:
            raise CheckFailed(
                f"{folder}: AutoTokenizer encodes {len(different)} of {len(texts)} unusual {kind} differently, for "
                f"example {different[0]!r}",
                "keep the checkpoint, and report this",
            )
    return (
        f"AutoTokenizer: {type(reference).__name__} gives the same ids to {len(texts)} unusual strings, texts and pairs"
    )
