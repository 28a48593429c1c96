"""Runs the transformers Trainer on prepared examples until the gate closes, set up as in transformers' example scripts
or tuned. Its process imports nothing of lmtool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from timing.gate import Gate, peak_bytes

NAMES = {
    "bert": {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads", "intermediate_size": "feedforward_size",
        "max_position_embeddings": "max_positions", "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    "gpt": {
        "vocab_size": "vocab_size", "n_embd": "hidden_size", "n_layer": "num_layers", "n_head": "num_heads",
        "n_inner": "feedforward_size", "n_positions": "max_positions", "resid_pdrop": "dropout",
        "embd_pdrop": "dropout", "attn_pdrop": "attention_dropout",
    },
    "t5": {
        "vocab_size": "vocab_size", "d_model": "hidden_size", "num_layers": "num_layers", "num_heads": "num_heads",
        "d_ff": "feedforward_size",
    },
    "bart": {
        "vocab_size": "vocab_size", "d_model": "hidden_size", "encoder_layers": "num_layers",
        "decoder_layers": "num_layers", "encoder_attention_heads": "num_heads", "decoder_attention_heads": "num_heads",
        "encoder_ffn_dim": "feedforward_size", "decoder_ffn_dim": "feedforward_size",
        "max_position_embeddings": "max_positions",
    },
}  # fmt: skip
CLASSES = {"classification": "BertForSequenceClassification", "extractive_qa": "BertForQuestionAnswering"}
NEVER = 1_000_000


def trainer_model(settings: dict[str, Any], kind: str | None = None) -> Any:
    """The model with random weights. kind: the kind of the task; None for a language model."""
    import transformers

    transformers.set_seed(settings["seed"])
    fields = {theirs: settings["model"][ours] for theirs, ours in NAMES[settings["family"]].items()}
    if settings["family"] == "gpt":
        # With the default cache, transformers builds no mask for packed documents, which then attend to each other.
        packed = {"use_cache": False} if settings.get("variant", {}).get("flattened") else {}
        config = transformers.GPT2Config(**fields, bos_token_id=None, eos_token_id=None, **packed)
        return transformers.GPT2LMHeadModel(config)
    model = getattr(transformers, CLASSES[kind] if kind else "BertForMaskedLM")
    return model(transformers.BertConfig(**fields, num_labels=2))


class Rows:
    """The examples for the Trainer's collators, from flat arrays: the data set with the least overhead."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        data, self.options = numpy.load(folder / "examples.npz"), settings["variant"]
        rows = self.options["rows"]
        prefix = "separate" if rows == "group_texts" else rows
        self.tokens, self.boundaries = data[f"{prefix}_tokens"], data[f"{prefix}_borders"]
        if rows == "group_texts":
            # run_mlm's group_texts: one stream, split into rows of the maximum length without the remainder.
            self.boundaries = numpy.arange(0, len(self.tokens) + 1, settings["max_length"])
        self.special = numpy.isin(self.tokens, data["special_ids"]).astype(int)
        self.task = settings["task"] is not None
        self.masked = settings["family"] == "bert" and not self.task
        self.labels = data["task_labels"] if self.task else None
        self.segments = data.get("task_segments") if self.task else None

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        place = slice(self.boundaries[number], self.boundaries[number + 1])
        row: dict[str, Any] = {"input_ids": self.tokens[place].tolist()}
        if self.options.get("flattened"):
            return row
        length = len(row["input_ids"])
        row["attention_mask"] = [1] * length
        if self.masked:
            row["special_tokens_mask"] = self.special[place].tolist()
        if self.segments is not None:
            row["token_type_ids"] = self.segments[place].tolist()
        if (padding := self.options.get("padding")) is not None:  # the scripts pad their data sets before training
            for values in row.values():
                values += [0] * (padding - length)
        if self.labels is not None:
            names = ("labels",) if self.labels.ndim == 1 else ("start_positions", "end_positions")
            row |= zip(names, self.labels[number].reshape(-1).tolist(), strict=True)
        return row


class Collator:
    """The collator of the example scripts. Adds the `counts` of each batch: real tokens, examples, and positions with
    padding, as plain numbers, since another process may collate."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]):
        self.collate = collator_of(tokenizer, settings)

    def __call__(self, rows: list[dict]) -> Any:
        batch = self.collate(rows)
        tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
        batch["counts"] = {"tokens": tokens, "examples": len(rows), "slots": batch["input_ids"].numel()}
        return batch


def collator_of(tokenizer: Any, settings: dict[str, Any]) -> Any:
    """run_mlm and run_clm pad to the longest row of the batch; packed rows need no padding. run_glue and run_qa stack
    rows that were padded before."""
    import transformers

    options = settings["variant"]
    if options.get("flattened"):
        return transformers.DataCollatorWithFlattening()
    multiple = {"pad_to_multiple_of": options.get("multiple")}
    if settings["task"] is None:
        if options["rows"] == "joined":  # run_clm's group_texts
            return lambda rows: transformers.default_data_collator([row | {"labels": row["input_ids"]} for row in rows])
        kind = {"mlm": True, "mlm_probability": 0.15} if settings["family"] == "bert" else {"mlm": False}
        return transformers.DataCollatorForLanguageModeling(tokenizer=tokenizer, **kind, **multiple)
    if options.get("padding") is not None:
        return transformers.default_data_collator
    return transformers.DataCollatorWithPadding(tokenizer, padding="longest", **multiple)


def arguments_of(folder: Path, settings: dict[str, Any]) -> Any:
    from transformers import TrainingArguments

    options, cuda = settings["variant"], settings["device"] == "cuda"
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=not cuda,
        bf16=settings["precision"] == "bf16",
        optim="adamw_torch_fused",
        torch_compile=bool(options.get("compile")),
        # On CUDA the collator, which is Python code, is slower than the step.
        dataloader_num_workers=4 if cuda else options.get("workers", 0),
        per_device_train_batch_size=settings["batch"],
        max_steps=NEVER,
        learning_rate=settings["lr"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["clip_norm"],
        # The examples are stored in lmtool's order; grouping by length reorders them.
        train_sampling_strategy="group_by_length" if options.get("grouped") else "sequential",
        # Otherwise the collator would recompute `special_tokens_mask` in Python, token by token.
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )


def run_trainer(folder: Path, settings: dict[str, Any], gate: Gate, witness: Any = None) -> None:
    """witness: receives the model before the first step, may replace each batch, and receives each loss."""
    from transformers import PreTrainedTokenizerFast, PrinterCallback, Trainer, TrainerCallback
    from transformers.utils import logging

    imports_bytes = peak_bytes("cpu")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder / "tokenizer"))
    if tokenizer.pad_token in (None, tokenizer.eos_token):  # otherwise the collator treats ends of texts as padding
        tokenizer.add_special_tokens({"pad_token": "<pad>"})

    class GatedSteps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.open()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not gate.open():
                control.should_training_stop = True

    class CountingTrainer(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            gate.count(**inputs.pop("counts"))
            if witness is not None:
                inputs = witness.batch_for(inputs)
            loss = super().training_step(model, inputs, *rest, **named)
            if witness is not None:
                witness.record_step(model, loss)
            return loss

    model = trainer_model(settings, settings["task"] and settings["task"]["kind"])
    if witness is not None:
        witness.give_weights(model)
    rows, collate = Rows(folder, settings), Collator(tokenizer, settings)
    trainer = CountingTrainer(
        model, arguments_of(folder, settings), collate, rows, processing_class=tokenizer, callbacks=[GatedSteps()]
    )
    trainer.remove_callback(PrinterCallback)
    gate.say({"ready": "trainer", "imports_bytes": imports_bytes, "parameters": model.num_parameters()})
    trainer.train()
