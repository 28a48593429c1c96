"""`lmtool tokenizer`: train a vocabulary on text, by itself."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from lmtool.data.sources import documents, open_source
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.text import plain
from lmtool.resolver.schema.run import TokenizerCommandConfig
from lmtool.tokenizers.tokenizer import FILES

SAMPLE_TOKENS = 3
MEASURED = 500


def run(config: TokenizerCommandConfig) -> dict[str, Any]:
    """Train, save, and say how well it fits held-out text."""
    folder = Path(config.output).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"output={config.output} is not empty", "use a new folder")
    output = Output()
    progress = output.stage
    source = open_source(config.data, config.cache_dir, progress, config.offline)
    if config.tokenizer.vocab_size is None:
        raise UserError("tokenizer.vocab_size is null, and no model names one", "tokenizer.vocab_size=8192")
    size = config.tokenizer.vocab_size
    tokenizer = trained_tokenizer(config.tokenizer, source, size, config.cache_dir, progress)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
    except OSError as error:
        for name in FILES:  # half a tokenizer is none
            (folder / name).unlink(missing_ok=True)
        if new and folder.is_dir():
            folder.rmdir()
        raise UserError(f"output={config.output}: {error.strerror}", "use a folder that can be written") from error

    texts = list(islice(documents(source.parts("validation")), MEASURED))
    encoded = tokenizer.encode_batch(texts)
    tokens, unknown = sum(map(len, encoded)), tokenizer.roles.get("unk")
    lost = 0 if unknown is None else sum(int((ids == unknown).sum()) for ids in encoded)
    metadata = {
        "tokens": tokenizer.vocab_size,
        "tokens_asked_for": size,
        "characters_per_token": sum(map(len, texts)) / max(tokens, 1),
        "bytes_per_token": sum(len(text.encode()) for text in texts) / max(tokens, 1),
        "unknown_fraction": lost / max(tokens, 1),
    }
    output.line(f"{folder} · {_sizes(tokenizer.vocab_size, size)}")
    output.rows(
        [
            (
                "held-out text",
                f"{metadata['characters_per_token']:.2f} characters a token"
                f" · {metadata['bytes_per_token']:.2f} bytes a token"
                f" · {metadata['unknown_fraction']:.2%} of the tokens unknown",
            ),
            *(
                ("sample" if number == 0 else "", plain(" ".join(tokenizer.readable(ids[:24]))))
                for number, ids in enumerate(encoded[:SAMPLE_TOKENS])
            ),
        ]
    )
    return metadata


def _sizes(entries: int, requested: int) -> str:
    """The size of a vocabulary, and that asked for where the text did not give it."""
    if entries == requested:
        return f"{entries:,} tokens"
    return f"{entries:,} tokens of tokenizer.vocab_size={requested:,}: the text gives no more"
