"""What a checkpoint lost in a conversion: keys, values, layers, logits, token ids of strings.

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed
from lmtool.weights.folders import read_settings
from lmtool.weights.heads import CheckpointModel

ADVERSARIAL = (
    "", " ", "  two  spaces ", "\n\n\t", "Hello, World! It's 3.14; don't.", "ÀÉÎÕÜ naïve café Ångström",
    "İstanbul ẞ ﬁ ǅ", "e\u0301 n\u0303 \u0301 combining", "中文字 日本語 かな 한국어", "ไทย עברית العربية हिन्दी",
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f600", "zero\u200bwidth\u200d\ufeff",
    "control \x00\x01\x07\x7f\x85 \ufffd", "nbsp\u00a0wide\u3000line\u2028", "a" * 500, "字" * 200,
    "½ ² Ⅷ ① ｆｕｌｌ ١٢٣", "[CLS] [SEP] [MASK] [PAD] [UNK]", "<s> </s> <pad> <unk> <mask>",
    "<|endoftext|> <extra_id_0>", "##ing ▁the Ġthe </w>", "x=y+z; #include <stdio.h> https://a.b/c?d=e&f=%20",
    "``quoted'' “curly” ‘single’ … —", "\U0010ffff \ue000 soft\u00adhyphen",
)  # fmt: skip
"""Strings on which tokenizers are known to differ."""


ROUNDING = 1e-5
"""What is predicted of a text may differ by so much: a last layer may work on fewer of its tokens."""
OTHER_CODE = 1e-3
"""So much of the largest value may differ where another library computes it, in another order."""


@dataclass
class CheckpointComparison:
    """tensors: largest difference of each tensor on both sides. missing: tensors of the original that the copy lacks.
    unused: tensors of the copy's file that nothing reads. tied: pairs of names of one tensor. layers, logits,
    pair_logits: differences on a sample of two segments. texts: differences of predictions for texts ("texts") and
    pairs ("pairs"), relative to the largest value, infinite if a text is tokenized or segmented differently.
    strings: those with different ids."""

    tensors: dict[str, float]
    missing: list[str]
    unused: list[str]
    tied: list[str] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)
    logits: float | None = None
    pair_logits: float | None = None
    texts: dict[str, float] = field(default_factory=dict)
    strings: list[str] = field(default_factory=list)
    strings_compared: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing was lost: equal tensors, outputs and ids."""
        numbers = [*self.tensors.values(), *self.layers.values(), self.logits or 0.0, self.pair_logits or 0.0]
        # NaN counts as a difference.
        equal = all(number == 0.0 for number in numbers) and all(number < ROUNDING for number in self.texts.values())
        return equal and not self.missing and not self.strings

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values for the screen."""
        worst = sorted(self.tensors.items(), key=lambda item: -item[1])[:3]
        changed = [f"{name} {value:.2g}" for name, value in worst if value > 0]
        rows = [
            ("tensors", f"{len(self.tensors)} · largest difference {max(self.tensors.values(), default=0.0):.3g}"),
            *(("changed", change) for change in changed),
            ("missing keys", _these(self.missing)),
            ("unused keys", _these(self.unused)),
            ("tied weights", _these(self.tied)),
        ]
        if self.layers:
            each = " · ".join(f"{name} {value:.3g}" for name, value in self.layers.items())
            rows.append(("layers", f"largest differences on a sample: {each}"))
        rows.append(("logits", "none" if self.logits is None else f"largest difference {self.logits:.3g}"))
        if self.pair_logits is not None:
            rows.append(("pair logits", f"largest difference {self.pair_logits:.3g}"))
        if self.texts:
            each = " · ".join(f"{kind} {value:.3g}" for kind, value in self.texts.items())
            rows.append(("as read", f"largest differences, tokenized by the folder's files: {each}"))
        if self.strings_compared:
            share = f"{len(self.strings)} of {self.strings_compared} adversarial strings get other ids"
            rows.append(("tokenizer", share + (f": {self.strings[0]!r}" if self.strings else "")))
        return rows


def _these(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{len(names)}: {', '.join(names[:6])}{more}" if names else "none"


def compare_tensors(
    original: Mapping[str, Tensor], copy: Mapping[str, Tensor], unused: list[str]
) -> CheckpointComparison:
    """Compare tensors under the same names."""
    differences = {
        name: difference(tensor, copy[name])
        for name, tensor in original.items()
        if name in copy and copy[name].shape == tensor.shape
    }
    return CheckpointComparison(differences, [name for name in original if name not in differences], unused)


@torch.no_grad()
def compare_outputs(comparison: CheckpointComparison, original: CheckpointModel, copy: CheckpointModel) -> None:
    """Record the differences of each layer and of the logits, on a sample of random tokens, in two segments if the
    model has them."""
    backbone = original.backbone
    rows, longest = backbone.config.vocab_size, min(backbone.config.max_positions, 24)
    tokens = torch.arange(2 * longest - 5, dtype=torch.int64) * 7919 % rows
    pairs = backbone.config.segment_types > 1
    columns = {"segment": torch.arange(len(tokens)) % longest // (longest // 2 + 1)} if pairs else {}
    sample = Packed(tokens, (longest, longest - 5), columns)
    outputs = Packed(tokens.flip(0), sample.lengths) if isinstance(backbone, EncoderDecoder) else None
    read = sample if outputs is None else outputs
    seen: list[tuple[dict[str, Tensor], Tensor | None, Tensor | None]] = []
    for parts in (original.eval(), copy.eval()):
        layers = _Layers()
        hidden_TH = parts.hidden(sample, outputs, tap=layers)
        logits = parts.logits(hidden_TH, read), parts.pair_logits(hidden_TH, read)
        seen.append((layers.states | {"hidden": hidden_TH}, *logits))
    (mine, *my_logits), (copied, *their_logits) = seen
    comparison.layers = {name: difference(tensor, copied[name]) for name, tensor in mine.items()}
    comparison.logits, comparison.pair_logits = (
        difference(before, after) if before is not None and after is not None else None
        for before, after in zip(my_logits, their_logits, strict=True)
    )


def compare_tokenizers(comparison: CheckpointComparison, original: Tokenizer, copy: Tokenizer) -> None:
    """Record the strings that the two encode differently."""
    comparison.strings = different_ids(original, copy)
    comparison.strings_compared = len(ADVERSARIAL)


def different_ids(original: Tokenizer, copy: Tokenizer) -> list[str]:
    """The strings that the two encode differently. A folder and a checkpoint may disagree on whether special tokens are
    parsed in texts; here both settings are compared."""
    ids = [
        [tokenizer.parsing(parse).encode_batch(ADVERSARIAL) for parse in (False, True)]
        for tokenizer in (original, copy)
    ]
    return [
        text
        for number, text in enumerate(ADVERSARIAL)
        if any(mine[number].tolist() != copied[number].tolist() for mine, copied in zip(*ids, strict=True))
    ]


def tied_names(parts: CheckpointModel) -> list[str]:
    """Names of shared tensors, and of output layers that are the token table."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in parts.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.append(f"{name} = {first[id(parameter)]}")
        first.setdefault(id(parameter), name)
    for name, head in parts.heads.items():
        if isinstance(head, LMHead) and head.output is None:
            tied.append(f"heads.{name} = backbone.embed.token.weight")
    return tied


class _Layers(Tap):
    """Records the states (T, H) after the embedding and each layer, by name."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        self.states[f"{point.side} {point.layer}"] = x_TH
        return x_TH


def difference(tensor: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; infinite if their shapes differ."""
    if tensor.shape != other.shape:
        return float("inf")
    if not tensor.numel():
        return 0.0
    return float((tensor.double() - other.double()).abs().max())


# The result of transformers' AutoTokenizer, from the files of an exported folder alone; and a comparison with it, if
# transformers is installed.
#
# Shape letters: B rows, L the longest of them in tokens.


def tokenized(folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, Tensor]:
    """`AutoTokenizer.from_pretrained(folder)(texts, pairs, padding=True, truncation=True, return_tensors="pt")` for a
    folder with a plain tokenizer class: (B, L) int64 tensors by the names in its `model_input_names`."""
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
    """One line for the screen: AutoTokenizer encodes unusual strings as the tokenizer does, alone, as texts and as
    pairs; or transformers is not installed. CheckFailed if it encodes one differently, or cannot read the folder."""
    if find_spec("transformers") is None:
        return "AutoTokenizer: not compared, transformers is not installed"
    # Imported here: it takes seconds, and lmtool does without it.
    from transformers import AutoTokenizer, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a text may be longer than the model reads
    try:
        reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        special = tokenizer.pieces(sorted(tokenizer.special_ids))
        texts = [*ADVERSARIAL, *(f"a {token} b{token}c  {token}" for token in special)]
        original_logits = tokenizer.parsing(not read_settings(folder).get("split_special_tokens")).encode_batch(texts)
        expected = [ids.tolist() for ids in original_logits]
        compared = {"strings": (expected, reference(texts, add_special_tokens=False)["input_ids"])}
        for kind, columns in (("texts", (texts,)), ("pairs", (texts, texts[::-1]))):
            rows = tokenized(folder, *columns)
            real = rows["attention_mask"].bool()
            for name, values in reference(*columns, truncation=True).items():
                actual = [row[mask].tolist() for row, mask in zip(rows[name], real, strict=True)]
                compared[f"{name} of {kind}"] = (actual, values)
    except Exception as problem:  # transformers raises of any kind
        raise CheckFailed(
            f"{folder}: AutoTokenizer cannot read it: {problem}", "keep the checkpoint, and report it"
        ) from problem
    finally:
        logging.set_verbosity(verbosity)
    for kind, (mine, other) in compared.items():
        different = [text for text, *rows in zip(texts, mine, other, strict=True) if rows[0] != rows[1]]
        if different:
            raise CheckFailed(
                f"{folder}: AutoTokenizer reads {len(different)} of {len(texts)} unusual {kind} in another way, such "
                f"as {different[0]!r}",
                "keep the checkpoint, and report it",
            )
    return (
        f"AutoTokenizer: {type(reference).__name__} gives the same ids to {len(texts)} unusual strings, texts and pairs"
    )
