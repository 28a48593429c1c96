"""What transformers' AutoTokenizer makes of texts, by the files of an exported folder alone; and, where transformers is
installed, a comparison with itself.

Shape letters: B rows, L the longest of them in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from lmtool.errors import CheckFailed
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.comparing import ADVERSARIAL
from lmtool.weights.folders import read_settings


def tokenized(folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, Tensor]:
    """`AutoTokenizer.from_pretrained(folder)(texts, pairs, padding=True, truncation=True, return_tensors="pt")` of a
    folder that names a plain tokenizer class: (B, L) int64 tensors by the names in its `model_input_names`."""
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
    """One line: that AutoTokenizer itself reads unusual strings as the tokenizer does, alone, as texts and as pairs; or
    that transformers is not installed. CheckFailed where it reads one in another way, and where it reads nothing of the
    folder."""
    if find_spec("transformers") is None:
        return "AutoTokenizer: not compared, transformers is not installed"
    # Imported here: it takes seconds, and lmtool does without it.
    from transformers import AutoTokenizer, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a text may be longer than the model reads
    try:
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        special = tokenizer.pieces(sorted(tokenizer.special_ids))
        texts = [*ADVERSARIAL, *(f"a {token} b{token}c  {token}" for token in special)]
        ours = tokenizer.parsing(not read_settings(folder).get("split_special_tokens")).encode_batch(texts)
        wanted = [ids.tolist() for ids in ours]
        given = {"strings": (wanted, theirs(texts, add_special_tokens=False)["input_ids"])}
        for kind, columns in (("texts", (texts,)), ("pairs", (texts, texts[::-1]))):
            rows = tokenized(folder, *columns)
            real = rows["attention_mask"].bool()
            for name, values in theirs(*columns, truncation=True).items():
                own = [row[mask].tolist() for row, mask in zip(rows[name], real, strict=True)]
                given[f"{name} of {kind}"] = (own, values)
    except Exception as problem:  # transformers raises of any kind
        raise CheckFailed(
            f"{folder}: AutoTokenizer cannot read it: {problem}", "keep the checkpoint, and report it"
        ) from problem
    finally:
        logging.set_verbosity(verbosity)
    for kind, (mine, other) in given.items():
        differing = [text for text, *rows in zip(texts, mine, other, strict=True) if rows[0] != rows[1]]
        if differing:
            raise CheckFailed(
                f"{folder}: AutoTokenizer reads {len(differing)} of {len(texts)} unusual {kind} in another way, such "
                f"as {differing[0]!r}",
                "keep the checkpoint, and report it",
            )
    return f"AutoTokenizer: {type(theirs).__name__} gives the same ids to {len(texts)} unusual strings, texts and pairs"
