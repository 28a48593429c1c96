"""The methods paragraph of a run for a paper, with its citations: methods.tex and references.bib in the run folder.

Facts come from the run's files alone. A component that has a published source is cited; other components, such as those
of plugins, are named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

from lmtool.config import saved
from lmtool.config.base import JsonMapping
from lmtool.reporting import html
from lmtool.reporting.console import latex_text
from lmtool.reporting.run_files import RunFiles, as_object, as_objects, read_run
from lmtool.reporting.sweep_files import is_sweep, read_sweep
from lmtool.reporting.sweep_groups import SEED
from lmtool.reporting.text import duration, exponent, is_number, percent, title
from lmtool.system.files import replace_bytes
from lmtool.system.secrets import masked
from lmtool.system.terminal import counted

REFERENCES = Path(__file__).with_name("references.bib")
_GLUE, _SUPERGLUE = "wang2019glue", "wang2019superglue"

SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "albert": ("ALBERT", "lan2020albert"),
        "bart": ("BART", "lewis2020bart"),
        "bert": ("BERT", "devlin2019bert"),
        "bigbird": ("BigBird", "zaheer2020bigbird"),
        "cnn": ("a convolutional network", "collobert2011scratch", "kim2014convolutional"),
        "deberta": ("DeBERTa", "he2021deberta"),
        "deberta_v3": ("DeBERTaV3", "he2023debertav3"),
        "distilbert": ("DistilBERT", "sanh2019distilbert"),
        "electra": ("ELECTRA", "clark2020electra"),
        "elmo": ("ELMo", "peters2018elmo"),
        "gpt": ("GPT-2", "radford2019gpt2"),
        "gpt1": ("GPT", "radford2018gpt"),
        "llama": ("Llama", "touvron2023llama"),
        "llama_encoder": ("Llama without a causal mask", "touvron2023llama", "behnamghader2024llm2vec"),
        "lstm": ("an LSTM language model", "dai2015semisupervised"),
        "modernbert": ("ModernBERT", "warner2024modernbert"),
        "qwen2": ("Qwen2", "yang2024qwen2"),
        "rnn_attention": ("a recurrent encoder-decoder with attention", "bahdanau2015attention"),
        "roberta": ("RoBERTa", "liu2019roberta"),
        "spanbert": ("SpanBERT", "joshi2020spanbert"),
        "t5": ("T5", "raffel2020t5"),
        "transformer": ("the Transformer", "vaswani2017attention"),
        "transformer_xl": ("Transformer-XL", "dai2019transformerxl"),
        "word_vectors": ("word vectors", "mikolov2013distributed"),
        "xlnet": ("XLNet", "yang2019xlnet"),
    },
    "model/positions": {
        "alibi": ("linear attention biases (ALiBi)", "press2022alibi"),
        "concatenated": ("learned positions, concatenated with the token vectors",),
        "learned": ("learned positions", "gehring2017convolutional"),
        "rotary": ("rotary positions", "su2021roformer"),
        "shaw": ("relative positions in keys and values", "shaw2018relative"),
        "sinusoidal": ("sinusoidal positions", "vaswani2017attention"),
        "t5": ("relative position biases", "raffel2020t5"),
        "tree_depth": ("depths in a dependency tree", "wang2019structural"),
        "tree_distance": ("distances in a dependency tree", "wang2019structural", "shaw2018relative"),
    },
    "tokenizer": {
        "bpe": ("byte-pair encoding", "sennrich2016bpe", "radford2018gpt"),
        "bytebpe": ("byte-level byte-pair encoding", "radford2019gpt2"),
        "sentencepiece": ("SentencePiece", "kudo2018sentencepiece"),
        "wordpiece": ("WordPiece", "devlin2019bert"),
    },
    "objective": {
        "bilm": ("bidirectional language modeling", "peters2018elmo"),
        "clm": ("causal language modeling", "radford2018gpt"),
        "denoising": ("denoising", "lewis2020bart"),
        "glove": ("GloVe", "pennington2014glove"),
        "mixture": ("a mixture of objectives", "raffel2020t5"),
        "mlm": ("masked language modeling", "devlin2019bert"),
        "mntp": ("masked next-token prediction", "behnamghader2024llm2vec"),
        "plm": ("permutation language modeling", "yang2019xlnet"),
        "prefix_lm": ("prefix language modeling", "liu2018wikipedia", "raffel2020t5"),
        "rtd": ("replaced-token detection", "clark2020electra"),
        "sequence_autoencoder": ("a sequence autoencoder", "dai2015semisupervised"),
        "skip_gram": ("skip-gram with negative sampling", "mikolov2013distributed"),
        "span": ("span masking", "joshi2020spanbert"),
        "span_corruption": ("span corruption", "raffel2020t5"),
        "task": ("a labeled task", "raffel2020t5"),
    },
    # By the repository on the Hugging Face hub, or by the kind of source.
    "data": {
        "HuggingFaceFW/fineweb": ("FineWeb", "penedo2024fineweb"),
        "Salesforce/wikitext": ("WikiText", "merity2017pointer"),
        "Skylion007/openwebtext": ("OpenWebText", "gokaslan2019openwebtext"),
        "allenai/c4": ("C4", "raffel2020t5"),
        "emozilla/pg19": ("PG-19", "rae2020compressive"),
        "roneneldan/TinyStories": ("TinyStories", "eldan2023tinystories"),
        "task": ("the texts of a task", "gururangan2020dont"),
        "wikitext": ("WikiText", "merity2017pointer"),
    },
    "task": {
        "ax": ("AX", _GLUE),
        "banking77": ("BANKING77", "casanueva2020banking"),
        "blimp": ("BLiMP", "warstadt2020blimp"),
        "bc5cdr": ("BC5CDR", "li2016cdr", "crichton2017multitask"),
        "boolq": ("BoolQ", "clark2019boolq", _SUPERGLUE),
        "cb": ("CB", "demarneffe2019commitmentbank", _SUPERGLUE),
        "cnn_dailymail": ("CNN/DailyMail", "hermann2015teaching", "see2017get"),
        "cola": ("CoLA", "warstadt2019cola", _GLUE),
        "conala": ("CoNaLa", "yin2018conala"),
        "conll2000": ("CoNLL-2000", "tjongkimsang2000chunking"),
        "conll2003": ("CoNLL-2003", "tjongkimsang2003ner"),
        "copa": ("COPA", "roemmele2011copa", _SUPERGLUE),
        "dailydialog": ("DailyDialog", "li2017dailydialog"),
        "e2e_nlg": ("E2E", "novikova2017e2e"),
        "geoquery": ("GeoQuery", "zelle1996geoquery", "iyer2017parser"),
        "glue": ("GLUE", _GLUE),
        "mixture": ("several tasks", "caruana1997multitask"),
        "mnli": ("MNLI", "williams2018mnli", _GLUE),
        "mrpc": ("MRPC", "dolan2005mrpc", _GLUE),
        "nq_open": ("Natural Questions without contexts", "kwiatkowski2019natural", "lee2019latent"),
        "qnli": ("QNLI", "rajpurkar2016squad", _GLUE),
        "qqp": ("QQP", _GLUE),
        "rte": ("RTE", "dagan2006rte", _GLUE),
        "samsum": ("SAMSum", "gliwa2019samsum"),
        "squad": ("SQuAD 1.1", "rajpurkar2016squad"),
        "squad_v2": ("SQuAD 2.0", "rajpurkar2018squad"),
        "sst2": ("SST-2", "socher2013sst", _GLUE),
        "stsb": ("STS-B", "cer2017sts", _GLUE),
        "swag": ("SWAG", "zellers2018swag"),
        "trivia_qa": ("TriviaQA without documents", "joshi2017triviaqa", "roberts2020much"),
        "ud_ewt": ("UD English EWT", "silveira2014ewt", "nivre2020ud"),
        "web_questions": ("WebQuestions", "berant2013semantic"),
        "wic": ("WiC", "pilehvar2019wic", _SUPERGLUE),
        "wmt16_en_de": ("WMT16 English-German", "bojar2016wmt"),
        "wnli": ("WNLI", "levesque2012winograd", _GLUE),
        "wnut17": ("WNUT-17", "derczynski2017wnut"),
        "xsum": ("XSum", "narayan2018xsum"),
    },
    "task/domain": {
        "coral": ("correlation alignment", "sun2016coral"),
        "dann": ("gradient reversal", "ganin2016dann"),
    },
    "tuning": {
        "adapter": ("adapters", "houlsby2019adapters"),
        "adapter_fusion": ("adapter fusion", "pfeiffer2021fusion"),
        "bitfit": ("BitFit", "benzaken2022bitfit"),
        "full": ("full finetuning",),
        "head": ("training of the head alone",),
        "ia3": ("(IA)$^3$", "liu2022ia3"),
        "last_n": ("finetuning of the top layers", "lee2019elsa"),
        "lora": ("LoRA", "hu2022lora"),
        "prefix": ("prefix tuning", "li2021prefix"),
        "prompt": ("soft prompts", "lester2021power"),
        "ptuning": ("P-tuning", "liu2021gpt"),
    },
    "tuning/regularization": {
        "l2_sp": ("L2-SP", "li2018explicit"),
        "mixout": ("mixout", "lee2020mixout"),
    },
    "tuning/schedule": {"gradual_unfreezing": ("gradual unfreezing", "howard2018ulmfit")},
    "distill": {
        "codistillation": ("codistillation", "anil2018codistillation", "zhang2018mutual"),
        "self": ("self-distillation", "zhang2019teacher"),
        "standard": ("knowledge distillation", "hinton2015distilling"),
    },
    "distill/term": {
        "attention": ("attention scores", "jiao2020tinybert"),
        "embeddings": ("embeddings", "jiao2020tinybert"),
        "hard": ("hard labels",),
        "hidden": ("hidden states", "jiao2020tinybert"),
        "interchange": ("interchange interventions", "geiger2022inducing", "wu2022causal"),
        "patience": ("the states of the class token", "sun2019patient"),
        "relations": ("self-attention relations", "wang2020minilm"),
        "soft": ("soft targets", "hinton2015distilling"),
        "states": ("output states", "sanh2019distilbert"),
    },
    "optimizer": {
        "adafactor": ("Adafactor", "shazeer2018adafactor"),
        "adam": ("Adam", "kingma2015adam"),
        "adamw": ("AdamW", "loshchilov2019decoupled"),
        "lamb": ("LAMB", "you2020lamb"),
        "muon": ("Muon", "jordan2024muon"),
        "stable_adamw": ("StableAdamW", "wortsman2023stable"),
    },
    "schedule": {
        "constant": ("a constant rate",),
        "cosine": ("cosine decay", "loshchilov2017sgdr"),
        "inverse_sqrt": ("decay with the inverse square root of the step", "vaswani2017attention"),
        "linear": ("linear decay", "devlin2019bert"),
        "polynomial": ("polynomial decay",),
        "wsd": ("warmup-stable-decay", "hu2024minicpm"),
    },
}
"""Words for a paper, and keys of references.bib, by group and name of a component."""

# Keys of the configuration that add a method: the key, the value (None for any but empty ones), words, references.
_DETAILS: tuple[tuple[str, object, str, str], ...] = (
    ("objective.pairs", "nsp", "next-sentence prediction", "devlin2019bert"),
    ("objective.pairs", "sop", "sentence-order prediction", "lan2020albert"),
    ("objective.lengths", "harmonic", "masks over n-grams", "lan2020albert"),
    ("objective.causal", None, "causal and masked texts with one head", "charpentier2024gptbert"),
    ("objective.longest_span", 3, "masks over spans of one to three tokens", "charpentier2024gptbert"),
    ("objective.z_loss", None, "a z-loss", "chowdhery2023palm"),
    ("objective.masking", "dynamic", "new masks in every epoch", "liu2019roberta"),
    ("objective.enhanced_decoder", True, "an enhanced mask decoder", "he2021deberta"),
    ("objective.label_smoothing", None, "label smoothing", "szegedy2016rethinking"),
    ("tokenizer.algorithm", "unigram", "a unigram vocabulary", "kudo2018subword"),
    ("tokenizer.algorithm", "bpe", "byte-pair encoding", "sennrich2016bpe"),
    ("task.label_smoothing", None, "label smoothing", "szegedy2016rethinking"),
    ("task.loss.label_smoothing", None, "label smoothing", "szegedy2016rethinking"),
    ("task.loss.focal_gamma", None, "focal loss", "lin2017focal"),
    ("task.prompt.template", None, "a pattern and a verbalizer", "schick2021exploiting"),
    ("task.demonstrations", None, "demonstrations in the input", "gao2021fewshot"),
    ("tuning.placement", "pfeiffer", "adapters after the feed-forward blocks", "pfeiffer2021fusion"),
    ("tuning.placement", "parallel", "adapters parallel to the feed-forward blocks", "he2022unified"),
    ("tuning.stack_on", None, "a stack of adapters", "pfeiffer2020madx"),
    ("tuning.dora", True, "weight decomposition (DoRA)", "liu2024dora"),
    ("tuning.rank_stabilised", True, "a rank-stabilized scale", "kalajdzievski2023rank"),
    ("tuning.deep", True, "prompts in every layer", "liu2022ptuning"),
    ("distill.targets", "teacher", "targets that the teacher generates", "kim2016sequence"),
    ("distill.targets", "both", "targets that the teacher generates", "kim2016sequence"),
    ("optimizer.batch_scaling.rule", "linear", "scaled in proportion to the batch", "goyal2017accurate"),
    ("optimizer.batch_scaling.rule", "sqrt", "scaled with the square root of the batch", "hoffer2017train"),
    ("schedule.decay_shape", "sqrt", "a $1-\\sqrt{}$ shape of the decay", "hagele2024scaling"),
)
# Choices that the saved configuration does not name, as typed: a size or a variant with a source of its own.
PRESETS: dict[str, tuple[str, ...]] = {
    "model=bert_mini": ("sizes", "turc2019compact"),
    "model=bert_small": ("sizes", "turc2019compact"),
    "model=ettin_17m": ("sizes", "weller2025ettin"),
    "model=ettin_32m": ("sizes", "weller2025ettin"),
    "model=ettin_68m": ("sizes", "weller2025ettin"),
    "model=smollm2_135m": ("sizes", "benallal2025smollm2"),
    "model=smollm2_360m": ("sizes", "benallal2025smollm2"),
    "model=qwen25_05b": ("sizes", "qwen2024qwen25"),
    "distill=born_again": ("a student of the size of its teacher", "furlanello2018bornagain"),
    "schedule=slanted_triangular": ("slanted triangular rates", "howard2018ulmfit"),
}


def write_methods(run_dir: str | Path) -> tuple[Path, Path]:
    """Writes methods.tex and references.bib of a run folder and returns their paths. Raises UserError if the folder is
    not a run or cannot be written."""
    run = read_run(run_dir)
    text = methods_text(run)
    paths = run.run_dir / "methods.tex", run.run_dir / "references.bib"
    with html.report_write_errors(run.run_dir):
        replace_bytes(paths[0], f"{masked(text)}\n".encode("utf-8", "replace"))
        replace_bytes(paths[1], "".join(f"{references()[key]}\n\n" for key in cited_keys(text)).encode())
    return paths


@cache
def references() -> dict[str, str]:
    """Returns the BibTeX entries by key."""
    entries = re.split(r"\n+(?=@)", REFERENCES.read_text(encoding="utf-8").strip())[1:]
    return {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in entries}


def cited_keys(text: str) -> list[str]:
    """Returns the keys that a text cites, sorted."""
    return sorted({key for keys in re.findall(r"\\cite\{([^}]*)\}", text) for key in keys.split(",")})


def methods_text(run: RunFiles) -> str:
    """Returns the paragraph in LaTeX."""
    try:
        config = as_object(saved.load(run.config))
    except yaml.YAMLError:
        config = {}
    sentences = [_model(run, config), _learned(run, config), _tuning(run, config), _distillation(config)]
    sentences += [_optimizer(run, config), _steps(run, config), _machine(run)]
    return "\n".join(filter(None, sentences))


def cited(group: str, name: object) -> str:
    """Returns the words for a component with its citation."""
    words, *keys = SOURCES.get(group, {}).get(str(name)) or (latex_text(title(str(name))),)
    return _with_citation(words, *keys)


def _with_citation(words: str, *keys: str) -> str:
    return f"{words}~\\cite{{{','.join(keys)}}}" if keys else words


def _value(config: JsonMapping, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = as_object(value).get(part)
    return value


def _details(config: JsonMapping, section: str) -> list[str]:
    details = []
    for key, expected, words, reference in _DETAILS:
        value = _value(config, key)
        if key.startswith(f"{section}.") and (value == expected if expected is not None else bool(value)):
            details.append(_with_citation(words, reference))
    return details


def _presets(run: RunFiles, section: str) -> list[str]:
    arguments = run.environment.get("arguments")
    typed = [str(word) for word in arguments] if isinstance(arguments, list) else []
    return [_with_citation(*PRESETS[word]) for word in typed if word in PRESETS and word.startswith(f"{section}=")]


def _chosen(group: str, name: object) -> list[str]:
    return [] if name in (None, "none") else [cited(group, name)]


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def _with(items: Sequence[str]) -> str:
    return f" with {_listed(items)}" if items else ""


def _typewriter(text: object) -> str:
    return f"\\texttt{{{latex_text(str(text))}}}"


def _percent(fraction: float) -> str:
    return latex_text(percent(fraction))


def _number(value: object) -> str:
    """Returns 3e-05 as $3 \\times 10^{-5}$."""
    if not is_number(value):
        return latex_text(str(value))
    mantissa, separator, power = exponent(value).partition("e")
    if 0.01 <= abs(value) < 10_000 or not separator:
        return f"{value:g}"
    factor = "" if mantissa == "1" else f"{mantissa} \\times "
    return f"${factor}10^{{{power}}}$"


def _model(run: RunFiles, config: JsonMapping) -> str:
    section, model = run.section("model"), as_object(config.get("model"))
    templates = {"layers": "{} layers", "width": "width {}", "heads": "{} attention heads"}
    sizes = [text.format(section[key]) for key, text in templates.items() if section.get(key)]
    if is_number(parameters := run.result.get("parameters")):
        sizes.append(f"{parameters:,} parameters")
    positions = as_object(model.get("positions")).get("name")
    extras = [*_presets(run, "model"), *_chosen("model/positions", positions)]
    start = section.get("started_from")
    verb = "finetuned" if config.get("task") else "pretrained"
    weights = f", starting from the weights of {_typewriter(start)}" if start else ""
    return f"We {verb} {cited('model', model.get('name'))}{_with(extras)} ({', '.join(sizes)}){weights}."


def _learned(run: RunFiles, config: JsonMapping) -> str:
    tokenizer, max_length = as_object(config.get("tokenizer")), config.get("max_length")
    vocabulary = run.section("model").get("vocabulary")
    words = f"{cited('tokenizer', tokenizer.get('name'))}{_with(_details(config, 'tokenizer'))}"
    entries = f" ({vocabulary:,} entries)" if isinstance(vocabulary, int) else ""
    tokens = f"Texts were split into tokens by {words}{entries}, up to {max_length} per sequence."
    data = run.section("data")
    if task := as_object(config.get("task")):
        names = _members("task", task)
        extras = [*_details(config, "task"), *_chosen("task/domain", as_object(task.get("domain")).get("name"))]
        rows = data.get("train_rows")
        examples = f" ({rows:,} training examples)" if isinstance(rows, int) else ""
        return f"The task was {names}{examples}{_with(extras)}. {tokens}"
    objective = as_object(config.get("objective"))
    return (
        f"The objective was {_members('objective', objective)}{_with(_details(config, 'objective'))}, on "
        f"{_corpora(as_object(config.get('data')))}. {tokens}"
    )


def _members(group: str, section: JsonMapping) -> str:
    members = section.get("members")
    if not isinstance(members, list):
        return cited(group, section.get("name"))
    names = [cited(group, member.get("name") if isinstance(member, dict) else member) for member in members]
    return f"{cited(group, 'mixture')}: {_listed(names)}"


def _corpora(data: JsonMapping) -> str:
    members = data.get("members")
    return _listed([_corpus(member) for member in as_objects(members)] if members else [_corpus(data)])


def _corpus(data: JsonMapping) -> str:
    repository = str(data.get("hub") or "").partition(":")[0]
    if repository or data.get("name") in SOURCES["data"]:
        return cited("data", repository or data.get("name"))
    return _typewriter(data.get("path") or data.get("name"))


def _tuning(run: RunFiles, config: JsonMapping) -> str:
    tuning = as_object(config.get("tuning"))
    if not tuning:
        return ""
    extras = _details(config, "tuning")
    for group in ("regularization", "schedule"):
        extras += _chosen(f"tuning/{group}", as_object(tuning.get(group)).get("name"))
    rank = f" of rank {tuning['rank']}" if tuning.get("name") == "lora" and tuning.get("rank") else ""
    trained, total = run.result.get("trainable_parameters"), run.result.get("parameters")
    part = f", which trains {trained:,} parameters" if is_number(trained) and trained != total else ""
    return f"The tuning method was {cited('tuning', tuning.get('name'))}{rank}{_with(extras)}{part}."


def _distillation(config: JsonMapping) -> str:
    distill = as_object(config.get("distill"))
    if distill.get("name") in (None, "none"):
        return ""
    extras = [
        f"{cited('distill/term', name)} (weight {_number(as_object(term).get('weight'))})"
        for name, term in as_object(distill.get("terms")).items()
    ]
    several = distill.get("teachers")
    teachers = [name for name in (distill.get("teacher"), *(several if isinstance(several, list) else [])) if name]
    source = f" from {_listed(list(map(_typewriter, teachers)))}" if teachers else ""
    return f"Training used {cited('distill', distill['name'])}{source}{_with([*extras, *_details(config, 'distill')])}."


def _optimizer(run: RunFiles, config: JsonMapping) -> str:
    optimizer, schedule = as_object(config.get("optimizer")), as_object(config.get("schedule"))
    scaling, rate = as_object(optimizer.get("batch_scaling")), _number(optimizer.get("lr"))
    units = [unit for unit in ("examples", "tokens") if is_number(scaling.get(unit))]
    references = [f"for {scaling[unit]:,} {unit}, {_details(config, 'optimizer')[0]}" for unit in units]
    values = [" ".join([f"peak learning rate {rate}", *references])]
    betas = optimizer.get("betas")
    if isinstance(betas, list):
        values += [f"$\\beta_{index}={beta}$" for index, beta in enumerate(betas, 1)]
    names = {"epsilon": "epsilon", "weight_decay": "weight decay", "clip_norm": "gradient norm at most"}
    values += [f"{words} {_number(optimizer[key])}" for key, words in names.items() if optimizer.get(key)]
    warmup = ""
    if schedule.get("warmup_steps"):
        warmup = f" after {counted(schedule['warmup_steps'], 'step')} of warmup"
    elif schedule.get("warmup_fraction"):
        warmup = f" after a warmup over {_percent(schedule['warmup_fraction'])} of the steps"
    extras = [*_presets(run, "schedule"), *_details(config, "schedule")]
    if is_number(decay := optimizer.get("layer_decay")) and decay != 1:
        extras.append(_with_citation(f"rates that decay by a factor of {decay} per layer", "clark2020electra"))
    rates = f"{cited('schedule', schedule.get('name'))}{warmup}{_with(extras)}"
    name = cited("optimizer", optimizer.get("name"))
    return f"The optimizer was {name} ({', '.join(values)}); the schedule was {rates}."


def _steps(run: RunFiles, config: JsonMapping) -> str:
    result = run.result
    seeds = _seeds(run) or [str(config.get("seed"))]
    seed = f"the random seed{'s were' if len(seeds) > 1 else ' was'} {_listed(seeds)}"
    if not is_number(result.get("steps")):
        return f"The{seed.removeprefix('the')}."
    batches = (f" {words.format(config[key])}" for key, words in _BATCHES.items() if is_number(config.get(key)))
    amounts = [f"{result['tokens']:,} tokens"] if is_number(result.get("tokens")) else []
    amounts += [f"{result['epochs']:.3g} epochs"] if is_number(result.get("epochs")) else []
    shares = [_percent(phase.get("share") or 0) for phase in as_objects(result.get("phases"))]
    phases = f" in {len(shares)} phases ({_listed(shares)} of the budget)" if len(shares) > 1 else ""
    return f"Training took {counted(result['steps'], 'step')}{next(batches, '')}{phases}: {_listed(amounts)}; {seed}."


def _seeds(run: RunFiles) -> list[str]:
    folder = run.run_dir.resolve()
    if not is_sweep(folder.parent):
        return []
    jobs = read_sweep(folder.parent).jobs
    settings = {job.folder.resolve(): {**job.overrides, SEED: ""} for job in jobs}
    return list(dict.fromkeys(job.seed for job in jobs if settings[job.folder.resolve()] == settings.get(folder)))


_BATCHES = {"batch_tokens": "of up to {:,} tokens", "batch_examples": "of {:,} examples"}


def _machine(run: RunFiles) -> str:
    environment, result = run.environment, run.result
    packages = as_object(environment.get("packages"))
    device = environment.get("accelerator") or environment.get("processor") or environment.get("device")
    devices = f"{result['devices']} devices: " if is_number(result.get("devices")) and result["devices"] > 1 else ""
    precision = str(run.section("model").get("precision", "")).partition(" ")[0]
    time = f" took {duration(result['seconds'])} and" if is_number(result.get("seconds")) else ""
    versions = [f"lmtool {packages['lmtool']}"] if packages.get("lmtool") else []
    versions += [f"PyTorch {packages['torch']}~\\cite{{paszke2019pytorch}}"] if packages.get("torch") else []
    versions += [f"Python {environment['python']}"] if environment.get("python") else []
    used = f"{devices}{latex_text(str(device))}" if device else "an unknown device"
    numbers = f" in {latex_text(precision)}" if precision else ""
    return f"It{time} ran on {used}{numbers}, with {_listed(versions)}."
