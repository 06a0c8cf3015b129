"""The figures, as data and as text. The JSON is `asdict` of Report, so these fields are its schema."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench import text
from .scores import Divergence

METHOD = """\
A text's tokens are cut into windows that do not overlap. Each window begins with the tokens that the tokenizer puts
before a text (BOS for most models), which count towards its length. All tokens of a window are scored, except the first
one and the added ones. The score is the natural logarithm of the probability that the model gives the token after all
tokens before it in the window. Perplexity is exp(-mean) of the scores over all windows. Divergence is
KL(reference || model) in nats over the whole vocabulary, at the same positions."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as it was loaded. `weight_bytes` are those of all weights in their formats, without padding."""

    name: str
    family: str
    parameters: int
    vocab_size: int
    device: str
    isa: str | None
    weights: str
    weight_bytes: int
    bits_per_weight: float
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class TextResult:
    """The figures of a text, or of all. `divergence` is None without a reference."""

    name: str
    tokens: int
    windows: int
    scored: int
    perplexity: float
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run: windows of `context` tokens, `added_tokens` of which are not text.

    `seconds` are those of scoring, by the model and its reference. Loading is left out.
    """

    version: str
    model: ModelFacts
    reference: ModelFacts | None
    context: int
    added_tokens: int
    texts: list[TextResult]
    total: TextResult
    seconds: float
    method: str = METHOD.replace("\n", " ")


def render(report: Report) -> str:
    """The report for people."""
    heading = ["text", "tokens", "scored", "perplexity"]
    if report.reference is not None:
        heading += ["reference", "mean KL", "99 % KL", "max KL", "same top"]
    results = report.texts if len(report.texts) == 1 else [*report.texts, report.total]
    rows = [heading, *(_row(result) for result in results)]
    added = f", the first {report.added_tokens} of them added by the tokenizer" if report.added_tokens else ""
    facts = [
        *_model("model", report.model),
        *([] if report.reference is None else _model("reference", report.reference)),
        ("windows", f"{report.total.windows} of up to {report.context} tokens{added}"),
        ("seconds", f"{report.seconds:.1f}, without loading"),
    ]
    explained = "" if report.reference is None else "KL(reference || model) is in nats; "
    return f"{text.facts(facts)}\n{_table(rows)}\n{explained}tidewheel eval --help explains the measurements\n"


def _model(title: str, model: ModelFacts) -> list[tuple[str, str]]:
    isa = f", {model.isa}" if model.isa else ""
    return [
        (title, f"{model.name} ({model.family}), {model.parameters / 1e6:.1f} M parameters, on {model.device}{isa}"),
        (
            "",
            f"weights: {model.weights}, {text.size(model.weight_bytes)}, {model.bits_per_weight:.2f} bits a weight; "
            f"KV: {model.kv_cache_dtype}",
        ),
    ]


def _row(result: TextResult) -> list[str]:
    row = [result.name, str(result.tokens), str(result.scored), _figure(result.perplexity)]
    if (found := result.divergence) is not None:
        kls = [f"{kl:.3g}" for kl in (found.mean_kl, found.p99_kl, found.max_kl)]
        row += [_figure(found.reference_perplexity), *kls, f"{100 * found.same_top:.2f} %"]
    return row


def _figure(perplexity: float) -> str:
    return f"{perplexity:.4f}" if perplexity < 1e6 else f"{perplexity:.4g}"


def _table(rows: list[list[str]]) -> str:
    width = max(len(row[0]) for row in rows)
    return text.table([[row[0].ljust(width), *row[1:]] for row in rows])
