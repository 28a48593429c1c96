"""lmtool: pretrain and finetune language models from composed YAML.

import lmtool
loaded = lmtool.load("runs/first")   # a run, a published folder, hf://org/name
loaded.predict(["a text"])           # as lmtool predict; .embed, .generate
loaded.model(**loaded.tokenizer(["a text"])).logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmtool.commands.api import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports `lmtool.load` at its first use, because it needs torch and the first screens of the command line do
    not."""
    if name == "load":
        from lmtool.commands.api import load

        return load
    raise AttributeError(f"module 'lmtool' has no attribute {name!r}")
