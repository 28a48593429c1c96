"""How text becomes tokens, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component

SPECIALS: dict[str, dict[str, str]] = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "albert": {
        "pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]",
        "bos": "[CLS]", "eos": "[SEP]",
    },
    "xlnet": {
        "unk": "<unk>", "bos": "<s>", "eos": "</s>", "cls": "<cls>", "sep": "<sep>", "pad": "<pad>", "mask": "<mask>",
    },
    "roberta": {
        "bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>",
    },
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "elmo": {"bos": "<S>", "eos": "</S>", "unk": "<UNK>"},
    "gpt2": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    "gpt1": {"unk": "<unk>"},
}  # fmt: skip
"""The special tokens each family's published vocabulary has, by role; richer ones first."""

# GPT-1's published <unk>, and one that begins, ends and pads: text is learned document by document.
_GPT = {**SPECIALS["gpt1"], **dict.fromkeys(("pad", "bos", "eos"), "<|endoftext|>")}


class TokenizerConfig(Config):
    """The base of every tokenizer."""

    reads_text: ClassVar[bool] = True
    """Whether it is trained on the run's text; its vocabulary is then kept for other runs on the same text."""

    most_characters: ClassVar[int] = 30_000_000
    """Characters it is trained on, at most: of more, a sample. The library takes about 10 bytes for each."""

    free_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "minimum_count", "parse_special_tokens")
    """Fields that may differ from a checkpoint's: they are read in training a vocabulary only, or change no entry."""

    name: str = Field(description="Which tokenizer.")
    vocab_size: int | None = Field(
        None, ge=16, le=10_000_000, description="Entries of the vocabulary, special tokens included. Null: the model's."
    )
    parse_special_tokens: bool = Field(
        False, description="Read what looks like a special token ([MASK], </s>) in a text as that token, not as text."
    )

    @property
    def specials(self) -> dict[str, str] | None:
        """Its special tokens by role. None where its files alone tell."""
        return None

    @property
    def roles(self) -> frozenset[str] | None:
        """The roles of its special tokens, `sentinel` too where it has sentinels. None where its files alone tell."""
        return None if self.specials is None else frozenset(self.specials)


@component("tokenizer", "wordpiece", builder="lmtool.tokenizers.trained:train_wordpiece")
class WordPieceConfig(TokenizerConfig):
    """WordPiece with BERT's text cleaning and special tokens (Devlin et al. 2019)."""

    name: Literal["wordpiece"] = Field("wordpiece", description="WordPiece, as BERT has it.")
    lowercase: bool = Field(True, description="Lowercase the text and strip its accents (BERT's uncased models).")
    minimum_count: int = Field(2, ge=1, description="Occurrences a pair of pieces needs in the text to be joined.")

    @property
    def specials(self) -> dict[str, str]:
        return SPECIALS["bert"]


@component("tokenizer", "bytebpe", builder="lmtool.tokenizers.trained:train_byte_level_bpe")
class ByteBpeConfig(TokenizerConfig):
    """Byte-level byte-pair encoding with the splitting of words of GPT-2 (Radford et al. 2019) or Qwen2."""

    name: Literal["bytebpe"] = Field("bytebpe", description="Byte-level byte-pair encoding, as GPT-2 has it.")
    vocab_size: int | None = Field(
        None,
        ge=257,
        le=10_000_000,
        description="Entries of the vocabulary: the 256 bytes, special tokens, the merges. Null: the model's.",
    )
    special_tokens: Literal["gpt2", "roberta", "bert"] = Field(
        "gpt2",
        description="gpt2: <|endoftext|> alone; roberta (and BART): <s> <pad> </s> <unk> <mask>; bert (ModernBERT): "
        "[PAD] [UNK] [CLS] [SEP] [MASK].",
    )
    splitting: Literal["gpt2", "qwen2"] = Field(
        "gpt2",
        description="Where words end. gpt2: at spaces, and between letters, digits and others; qwen2: behind each "
        "digit and at line ends too, over Unicode's NFC, as transformers reads all texts for that model.",
    )
    minimum_count: int = Field(2, ge=1, description="Occurrences a pair of pieces needs in the text to be joined.")

    @property
    def specials(self) -> dict[str, str]:
        """GPT-2's one token pads too."""
        tokens = SPECIALS[self.special_tokens]
        return {"pad": tokens["pad" if "pad" in tokens else "eos"], **tokens}


@component("tokenizer", "bpe", builder="lmtool.tokenizers.trained:train_bpe")
class BpeConfig(TokenizerConfig):
    """Byte-pair encoding of lowercased words whose last piece ends with </w> (Radford et al. 2018)."""

    name: Literal["bpe"] = Field("bpe", description="Byte-pair encoding of words, as GPT of 2018 has it.")
    minimum_count: int = Field(2, ge=1, description="Occurrences a pair of pieces needs in the text to be joined.")

    @property
    def specials(self) -> dict[str, str]:
        return _GPT


@component("tokenizer", "sentencepiece", builder="lmtool.tokenizers.sentencepiece:train")
class SentencePieceConfig(TokenizerConfig):
    """Pieces of text whose spaces are part of them, trained by the SentencePiece library (Kudo, Richardson 2018)."""

    # The library's suffix array takes about 22 bytes a character.
    most_characters: ClassVar[int] = 20_000_000

    free_fields: ClassVar[tuple[str, ...]] = (*TokenizerConfig.free_fields, "character_coverage")

    name: Literal["sentencepiece"] = Field("sentencepiece", description="SentencePiece's unigram or BPE pieces.")
    algorithm: Literal["unigram", "bpe"] = Field(
        "unigram",
        description="unigram: the most probable cut of a text into pieces (Kudo 2018), as T5 and ALBERT have it; bpe: "
        "pairs of pieces are joined, the commonest first (Sennrich et al. 2016), as Llama has it.",
    )
    special_tokens: Literal["t5", "albert", "xlnet"] = Field(
        "t5",
        description="t5: <pad> </s> <unk> first and the sentinels last; albert: <pad> <unk> [CLS] [SEP] [MASK] first; "
        "xlnet: <unk> <s> </s> <cls> <sep> <pad> <mask> <eod> <eop> first.",
    )
    sentinels: int = Field(
        100, ge=0, le=1000, description="With special_tokens=t5: <extra_id_0>, ..., the first one with the largest id."
    )
    lowercase: bool = Field(
        False,
        description="With special_tokens=albert or xlnet: lowercase the text (ALBERT's models). Of both, accents are "
        "stripped in any case.",
    )
    character_coverage: float = Field(
        0.9995, ge=0.98, le=1, description="Share of the text's characters that have an entry; the rest is unknown."
    )

    @property
    def specials(self) -> dict[str, str]:
        return SPECIALS[self.special_tokens]

    @property
    def roles(self) -> frozenset[str]:
        return _with_sentinels(self.specials, self.special_tokens == "t5" and self.sentinels > 0)


class ListedConfig(TokenizerConfig):
    """The base of vocabularies that list whole units of a text; others are unknown."""

    special_tokens: Literal["bert", "roberta", "gpt", "t5"] = Field(
        "bert",
        description="bert: [PAD] [UNK] [CLS] [SEP] [MASK]; roberta (and BART): <s> <pad> </s> <unk> <mask>; gpt: <unk> "
        "<|endoftext|>; t5: <pad> </s> <unk>, and the sentinels.",
    )
    sentinels: int = Field(
        100, ge=0, le=1000, description="With special_tokens=t5: <extra_id_0>, ..., the first one with the largest id."
    )

    @property
    def specials(self) -> dict[str, str]:
        return _GPT if self.special_tokens == "gpt" else SPECIALS[self.special_tokens]

    @property
    def roles(self) -> frozenset[str]:
        return _with_sentinels(self.specials, self.special_tokens == "t5" and self.sentinels > 0)


@component("tokenizer", "word", builder="lmtool.tokenizers.trained:train_words")
class WordConfig(ListedConfig):
    """Words with BERT's text cleaning and splitting; rare ones are unknown."""

    name: Literal["word"] = Field("word", description="Whole words, and an unknown one.")
    lowercase: bool = Field(True, description="Lowercase the text and strip its accents.")
    minimum_count: int = Field(2, ge=1, description="Occurrences a word needs in the text to have an entry.")


@component("tokenizer", "character", builder="lmtool.tokenizers.trained:train_characters")
class CharacterConfig(ListedConfig):
    """Characters as they stand, white space too; rare ones are unknown."""

    name: Literal["character"] = Field("character", description="Single characters, and an unknown one.")
    lowercase: bool = Field(False, description="Lowercase the text; accents stay.")


@component("tokenizer", "spelled", builder="lmtool.tokenizers.trained:train_spelled_wordpiece")
class SpelledConfig(TokenizerConfig):
    """Words with BERT's splitting, as they are written; one that the vocabulary lacks is spelled: by the longest
    listed word that it begins with, and single bytes."""

    name: Literal["spelled"] = Field("spelled", description="Whole words, and bytes that spell the others.")
    vocab_size: int | None = Field(
        None,
        ge=261,
        le=10_000_000,
        description="Entries of the vocabulary: special tokens, words, and 257 that spell others. Null: the model's.",
    )
    minimum_count: int = Field(2, ge=1, description="Occurrences a word needs in the text to have an entry.")

    @property
    def specials(self) -> dict[str, str]:
        """The token that ends a text pads too."""
        return {"pad": SPECIALS["elmo"]["eos"], **SPECIALS["elmo"]}


def _with_sentinels(specials: dict[str, str], sentinels: bool) -> frozenset[str]:
    return frozenset(specials) | (frozenset({"sentinel"}) if sentinels else frozenset())


@component("tokenizer", "folder", builder="lmtool.tokenizers.trained:load")
class FolderConfig(TokenizerConfig):
    """A tokenizer that exists: of a run, a checkpoint, or a folder in Hugging Face's layout."""

    reads_text: ClassVar[bool] = False
    # Where it lies differs from machine to machine, and a checkpoint carries its own copy.
    free_fields: ClassVar[tuple[str, ...]] = (*TokenizerConfig.free_fields, "path")

    name: Literal["folder"] = Field("folder", description="A tokenizer that exists.")
    path: str = Field(min_length=1, description="Folder with tokenizer files, a run folder, or hf://org/name@revision.")
