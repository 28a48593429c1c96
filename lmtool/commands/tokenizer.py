"""`lmtool tokenizer`: trains a vocabulary on text."""

from __future__ import annotations

from itertools import islice

from lmtool.data.sources import documents, open_source
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.text import plain
from lmtool.resolver.commands import TokenizerCommandConfig
from lmtool.system.files import user_path
from lmtool.tokenizers.tokenizer import SAVED_FILES

SAMPLE_TEXTS = 3
MEASURED_TEXTS = 500


def run(config: TokenizerCommandConfig) -> dict[str, float]:
    """Trains and saves a tokenizer, and prints its statistics on held-out text."""
    folder = user_path(config.output)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"output={config.output} is not empty", "use a new folder")
    output = Output()
    progress = output.stage
    source = open_source(config.data, config.cache_dir, progress, config.offline)
    if config.tokenizer.vocab_size is None:
        raise UserError("tokenizer.vocab_size is null, and no model sets it", "set tokenizer.vocab_size=8192")
    size = config.tokenizer.vocab_size
    tokenizer = trained_tokenizer(config.tokenizer, source, size, config.cache_dir, progress)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
    except OSError as error:
        for name in SAVED_FILES:  # an incomplete tokenizer is useless
            (folder / name).unlink(missing_ok=True)
        if is_new and folder.is_dir():
            folder.rmdir()
        raise UserError(
            f"output={config.output} cannot be written: {error.strerror}", "use a folder that you can write to"
        ) from error

    texts = list(islice(documents(source.parts("validation")), MEASURED_TEXTS))
    encoded = tokenizer.encode_batch(texts)
    tokens, unknown = sum(map(len, encoded)), tokenizer.roles.get("unk")
    unknown_tokens = 0 if unknown is None else sum(int((ids == unknown).sum()) for ids in encoded)
    metadata = {
        "tokens": tokenizer.vocab_size,
        "tokens_asked_for": size,
        "characters_per_token": sum(map(len, texts)) / max(tokens, 1),
        "bytes_per_token": sum(len(text.encode()) for text in texts) / max(tokens, 1),
        "unknown_fraction": unknown_tokens / max(tokens, 1),
    }
    output.line(f"{folder} · {_sizes(tokenizer.vocab_size, size)}")
    averages = (
        f"{metadata['characters_per_token']:.2f} characters a token · {metadata['bytes_per_token']:.2f} bytes a token"
    )
    rows = [("held-out text", f"{averages} · {metadata['unknown_fraction']:.2%} of the tokens unknown")]
    for number, ids in enumerate(encoded[:SAMPLE_TEXTS]):
        rows.append(("sample" if number == 0 else "", plain(" ".join(tokenizer.readable(ids[:24])))))
    output.rows(rows)
    return metadata


def _sizes(entries: int, requested: int) -> str:
    if entries == requested:
        return f"{entries:,} tokens"
    return f"{entries:,} tokens of tokenizer.vocab_size={requested:,}: the text has no more"
