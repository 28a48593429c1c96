"""Configuration of tokenizers. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.registry import component

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "spiece.model", "sentencepiece.model", "spm.model", "tokenizer.model", "config.json"),
)
"""Files that define a tokenizer. config.json is among them because it may name the tokenizer's class."""
SPECIALS: dict[str, dict[str, str]] = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "albert": {
        "pad": "<pad>",
        "unk": "<unk>",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "mask": "[MASK]",
        "bos": "[CLS]",
        "eos": "[SEP]",
    },
    "xlnet": {
        "unk": "<unk>",
        "bos": "<s>",
        "eos": "</s>",
        "cls": "<cls>",
        "sep": "<sep>",
        "pad": "<pad>",
        "mask": "<mask>",
    },
    "roberta": {
        "bos": "<s>",
        "cls": "<s>",
        "pad": "<pad>",
        "eos": "</s>",
        "sep": "</s>",
        "unk": "<unk>",
        "mask": "<mask>",
    },
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "elmo": {"bos": "<S>", "eos": "</S>", "unk": "<UNK>"},
    "gpt2": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    "gpt1": {"unk": "<unk>"},
}
"""Special tokens of each family's pretrained vocabulary by role, in the order of their ids."""

# GPT-1's <unk>, and a token that starts, ends and pads documents, which pretraining needs.
_GPT = {**SPECIALS["gpt1"], **dict.fromkeys(("pad", "bos", "eos"), "<|endoftext|>")}


class TokenizerConfig(Config):
    """Base class of tokenizer configurations."""

    reads_text: ClassVar[bool] = True
    """Whether the vocabulary is trained on the run's text, and cached for other runs on the same text."""

    most_characters: ClassVar[int] = 30_000_000
    """Maximum number of characters to train on; longer text is sampled. Training needs about 10 bytes per character."""

    adjustable_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "minimum_count", "parse_special_tokens")
    """Fields that may differ from a checkpoint's tokenizer, since they only affect training or change no entry."""

    name: str = Field(description="Kind of tokenizer.")
    vocab_size: int | None = Field(
        None, ge=16, le=10_000_000, description="vocabulary size, special tokens included; null: the model's"
    )
    parse_special_tokens: bool = Field(
        False, description="true: parse special tokens that occur in texts; false: treat them as text"
    )

    @property
    def specials(self) -> dict[str, str] | None:
        """Special tokens by role. None if only the tokenizer's files define them."""
        return None

    @property
    def roles(self) -> frozenset[str] | None:
        """Roles of the special tokens, including `sentinel` for sentinels. None if only files define them."""
        if self.specials is None:
            return None
        return frozenset(self.specials) | ({"sentinel"} if self.sentinel_count else set())

    @property
    def sentinel_count(self) -> int:
        """Number of T5's sentinels."""
        return 0


@component("tokenizer", "wordpiece", builder="lmtool.tokenizers.trained:train_wordpiece")
class WordPieceConfig(TokenizerConfig):
    """WordPiece with BERT's text cleaning and special tokens (Devlin et al. 2019)."""

    name: Literal["wordpiece"] = Field("wordpiece", description="WordPiece, as in BERT.")
    lowercase: bool = Field(True, description="lowercase the text and strip its accents (BERT's uncased models)")
    minimum_count: int = Field(2, ge=1, description="minimum frequency of a pair of subwords to be merged")

    @property
    def specials(self) -> dict[str, str]:
        return SPECIALS["bert"]


@component("tokenizer", "bytebpe", builder="lmtool.tokenizers.trained:train_byte_level_bpe")
class ByteBpeConfig(TokenizerConfig):
    """Byte-level byte-pair encoding with the word splitting of GPT-2 (Radford et al. 2019) or Qwen2."""

    name: Literal["bytebpe"] = Field("bytebpe", description="Byte-level byte-pair encoding, as in GPT-2.")
    vocab_size: int | None = Field(
        None,
        ge=257,
        le=10_000_000,
        description="vocabulary size: the 256 bytes, special tokens and merges; null: the model's",
    )
    special_tokens: Literal["gpt2", "roberta", "bert"] = Field(
        "gpt2",
        description="gpt2: <|endoftext|>; roberta (and BART): <s> <pad> </s> <unk> <mask>; bert: [PAD] [UNK] [CLS] "
        "[SEP] [MASK]",
    )
    splitting: Literal["gpt2", "qwen2"] = Field(
        "gpt2",
        description="gpt2: at spaces, between letters, digits and others; qwen2: also after each digit, at line ends. "
        "qwen2 also normalizes text to NFC, as transformers does for this model",
    )
    minimum_count: int = Field(2, ge=1, description="minimum frequency of a pair of subwords to be merged")

    @property
    def specials(self) -> dict[str, str]:
        """GPT-2's only token is also the padding token."""
        tokens = SPECIALS[self.special_tokens]
        return {"pad": tokens["pad" if "pad" in tokens else "eos"], **tokens}


@component("tokenizer", "bpe", builder="lmtool.tokenizers.trained:train_bpe")
class BpeConfig(TokenizerConfig):
    """Byte-pair encoding of lowercased words whose last subword ends with </w> (Sennrich et al. 2016; Radford et al.
    2018)."""

    name: Literal["bpe"] = Field("bpe", description="Byte-pair encoding of words, as in the GPT of 2018.")
    minimum_count: int = Field(2, ge=1, description="minimum frequency of a pair of subwords to be merged")

    @property
    def specials(self) -> dict[str, str]:
        return _GPT


@component("tokenizer", "sentencepiece", builder="lmtool.tokenizers.sentencepiece:train")
class SentencePieceConfig(TokenizerConfig):
    """SentencePiece: subwords that include spaces, trained by its library (Kudo and Richardson 2018)."""

    # The library's suffix array needs about 22 bytes per character.
    most_characters: ClassVar[int] = 20_000_000

    adjustable_fields: ClassVar[tuple[str, ...]] = (*TokenizerConfig.adjustable_fields, "character_coverage")

    name: Literal["sentencepiece"] = Field("sentencepiece", description="SentencePiece's unigram or BPE model.")
    algorithm: Literal["unigram", "bpe"] = Field(
        "unigram",
        description="unigram: the most probable segmentation; bpe: merge the most frequent pairs. unigram: Kudo 2018, "
        "as in T5 and ALBERT; bpe: Sennrich et al. 2016, as in Llama",
    )
    special_tokens: Literal["t5", "albert", "xlnet"] = Field(
        "t5",
        description="t5: <pad> </s> <unk>, and sentinels; albert: [CLS] [SEP] [MASK]; xlnet: <sep> <cls>. The "
        "first ids are, with t5: <pad> </s> <unk> (sentinels are last); with albert: <pad> <unk> [CLS] [SEP] [MASK]; "
        "with xlnet: <unk> <s> </s> <cls> <sep> <pad> <mask> <eod> <eop>",
    )
    sentinels: int = Field(
        100, ge=0, le=1000, description="with t5: number of <extra_id_0>, ..., at the end; the first has the largest id"
    )
    lowercase: bool = Field(False, description="with albert and xlnet: lowercase the text; accents are always stripped")
    character_coverage: float = Field(
        0.9995, ge=0.98, le=1, description="fraction of the text's characters in the vocabulary; all others are unknown"
    )

    @property
    def specials(self) -> dict[str, str]:
        return SPECIALS[self.special_tokens]

    @property
    def sentinel_count(self) -> int:
        return self.sentinels if self.special_tokens == "t5" else 0


class ListedConfig(TokenizerConfig):
    """Base class of word and character vocabularies. Words or characters outside the vocabulary are unknown."""

    special_tokens: Literal["bert", "roberta", "gpt", "t5"] = Field(
        "bert",
        description="bert: [PAD] [UNK] [CLS] [SEP] [MASK]; roberta (and BART): <s> </s> <mask>; gpt: <|endoftext|>; "
        "t5: </s>, and sentinels. roberta also has <pad> <unk>, gpt <unk>, t5 <pad> <unk>",
    )
    sentinels: int = Field(
        100, ge=0, le=1000, description="with t5: number of <extra_id_0>, ..., at the end; the first has the largest id"
    )

    @property
    def specials(self) -> dict[str, str]:
        return _GPT if self.special_tokens == "gpt" else SPECIALS[self.special_tokens]

    @property
    def sentinel_count(self) -> int:
        return self.sentinels if self.special_tokens == "t5" else 0


@component("tokenizer", "word", builder="lmtool.tokenizers.trained:train_words")
class WordConfig(ListedConfig):
    """Words with BERT's text cleaning and splitting; rare words are unknown."""

    name: Literal["word"] = Field("word", description="Words; rare words are unknown.")
    lowercase: bool = Field(True, description="lowercase the text and strip its accents")
    minimum_count: int = Field(2, ge=1, description="minimum frequency of a word in the vocabulary")


@component("tokenizer", "character", builder="lmtool.tokenizers.trained:train_characters")
class CharacterConfig(ListedConfig):
    """Characters, including white space; rare characters are unknown."""

    name: Literal["character"] = Field("character", description="Characters; rare characters are unknown.")
    lowercase: bool = Field(False, description="lowercase the text; accents are unchanged")


@component("tokenizer", "spelled", builder="lmtool.tokenizers.trained:train_spelled_wordpiece")
class SpelledConfig(TokenizerConfig):
    """Words with BERT's splitting, not normalized. A word outside the vocabulary is spelled: its longest prefix in the
    vocabulary, followed by bytes."""

    name: Literal["spelled"] = Field("spelled", description="Words; other words are spelled in bytes.")
    vocab_size: int | None = Field(
        None,
        ge=261,
        le=10_000_000,
        description="vocabulary size: <S> </S> <UNK>, words, and 257 entries for spelling; null: the model's",
    )
    minimum_count: int = Field(2, ge=1, description="minimum frequency of a word in the vocabulary")

    @property
    def specials(self) -> dict[str, str]:
        """The end token is also the padding token."""
        return {"pad": SPECIALS["elmo"]["eos"], **SPECIALS["elmo"]}


@component("tokenizer", "folder", builder="lmtool.tokenizers.trained:load")
class FolderConfig(TokenizerConfig):
    """An existing tokenizer, from a run, a checkpoint, or a folder in Hugging Face's format."""

    descriptions: ClassVar[dict[str, str]] = {"vocab_size": "ignored: the existing vocabulary is used"}

    reads_text: ClassVar[bool] = False
    # Paths differ between machines, and a checkpoint has a copy of its tokenizer.
    adjustable_fields: ClassVar[tuple[str, ...]] = (*TokenizerConfig.adjustable_fields, "path")

    name: Literal["folder"] = Field("folder", description="An existing tokenizer.")
    path: str = Field(min_length=1, description="folder with tokenizer files, a run folder, or hf://org/name@revision")
