"""lmtool: pretrain and finetune language models from composed YAML."""

__version__ = "0.1.0"
