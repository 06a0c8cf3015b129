"""Train the tokenizer and the demo model on generated text, and write a Hugging Face folder.

The schedule follows the clock: the learning rate has decayed to nothing when ``--minutes`` are over, however fast or
busy the machine is. A checkpoint is kept outside the model folder, and ``--resume`` continues from it. ``--draft``
trains a draft model for the demo model instead, with its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat import CHAT_TEMPLATE, spans
from .corpus import LETTERS_OFF, LETTERS_ON, Conversation, plain, training_item
from .model import DRAFT, Llama, Shape
from .words import CITIES, NAMES, WORDS

DEMO = Path(__file__).parents[2] / "server" / "demo"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
END_OF_TEXT, _, END_OF_TURN = range(3)
_LETTERS = re.compile(f"{LETTERS_ON}([A-Za-z]*){LETTERS_OFF}")


def train_tokenizer(seed: int, shape: Shape) -> Tokenizer:
    """Learn byte-level BPE merges from generated text.

    Slot words, the ones that get copied, spelled and reversed, are left out: they stay cut into short pieces, so the
    model meets every piece in many words and a new word looks no stranger than a known one.
    """
    rng = random.Random(f"tokenizer {seed}")
    slot_words = {word.lower() for word in (*WORDS, *NAMES, *(part for city in CITIES for part in city.split()))}
    counts: dict[str, int] = {}
    texts = []
    for _ in range(12000):
        item = training_item(rng)
        text = item.replace("\t", "") if isinstance(item, str) else "".join(text for text, _ in spans(item))
        texts.append(plain(text))
        for word in re.findall(r"[A-Za-z]+", texts[-1]):
            counts[word] = counts.get(word, 0) + 1
    keep = {word for word, count in counts.items() if count >= 40 and word.lower() not in slot_words}
    keep |= {word for word, count in counts.items() if count >= 400}

    def cut(text: str) -> str:
        for token in (*SPECIAL, *MARKUP):
            text = text.replace(token, "\n")
        return re.sub(r"[A-Za-z]+", lambda match: match.group() if match.group() in keep else "", text)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary - len(MARKUP),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(cut, texts), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer


def encode(tokenizer: Tokenizer, items: list[Conversation | str]) -> list[tuple[list[int], list[bool]]]:
    """Turn items into token ids and flags that say which ids are learned."""
    texts: list[str] = []
    flags: list[list[bool]] = []
    for item in items:
        pieces = _drill_spans(item) if isinstance(item, str) else spans(item)
        flags.append([])
        for text, learned in pieces:
            # Letters between the marks become pieces of their own, which keeps BPE from merging them.
            for number, part in enumerate(_LETTERS.split(text)):
                split = list(part) if number % 2 else [part]
                texts += split
                flags[-1] += [learned] * len(split)
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    rows = []
    for row_flags in flags:
        ids: list[int] = []
        learned_ids: list[bool] = []
        for learned in row_flags:
            piece = next(encoded).ids
            ids += piece
            learned_ids += [learned] * len(piece)
        rows.append((ids, learned_ids))
    return rows


def _drill_spans(text: str) -> list[tuple[str, bool]]:
    pieces: list[tuple[str, bool]] = []
    for line in text.split("\n"):
        given, learned = line.split("\t")
        pieces += [(given, False), (learned, True), ("\n", False)]
    return pieces


def batches(
    tokenizer: Tokenizer, rng: random.Random, tokens: int, drills: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of about ``tokens`` ids; rows of similar length sit together, so little is padding."""
    while True:
        rows = encode(tokenizer, [training_item(rng, drills) for _ in range(1500)])
        rows = sorted((row for row in rows if len(row[0]) <= 768), key=lambda row: len(row[0]) + rng.random() * 8)
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            inputs = torch.full((len(group), width), END_OF_TEXT)
            targets = torch.full((len(group), width), -1)
            for number, (ids, learned) in enumerate(group):
                inputs[number, : len(ids)] = torch.tensor(ids)
                wanted = [token if flag else -1 for token, flag in zip(ids[1:], learned[1:], strict=True)]
                targets[number, : len(wanted)] = torch.tensor(wanted)
            yield inputs, targets


def write_folder(out: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write everything that a Hugging Face model folder needs, except the model card."""
    shape = model.shape
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TURN,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": shape.epsilon,
        "rope_scaling": None,
        "rope_theta": shape.theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
    generation = {
        "bos_token_id": None,
        "do_sample": True,
        "eos_token_id": [END_OF_TURN, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "temperature": 0.2,
        "top_p": 0.9,
    }
    added = {}
    for token in (*SPECIAL, *MARKUP):
        special = token in SPECIAL
        entry = {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        added[str(tokenizer.token_to_id(token))] = entry | {"special": special}
    tokenizer_config: dict[str, Any] = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": shape.positions,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    save_file(model.hugging_face_weights(), str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file lets no other user read


# The embedding, which is the head too, wants smaller steps than Muon takes.
ADAM_SHARE_OF_RATE = 0.6


def make_optimizers(model: Llama, rate: float, parts: int) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, in ``parts`` optimizers that can step side by side, and AdamW for
    the rest. Muon learns more per token here.
    """
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    norms = [p for p in model.parameters() if p.dim() != 2]
    size = len(matrices) // parts
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices[at : at + size], lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        for at in range(0, len(matrices), size)
    ]
    groups = [
        {"params": [model.embedding.weight], "weight_decay": 0.01},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [*optimizers, torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)]


class Workers:
    """Threads that each compute the gradients of a share of the batch.

    Each core has a thread, and the threads wait for each other once per step. If all cores shared every operation, a
    late core on a busy machine would delay the others hundreds of times per step.
    """

    def __init__(self, model: Llama, count: int, device: str) -> None:
        self.model = model
        self.count = count
        self.device = device
        self.parameters = list(model.parameters())
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))

    def _share(self, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> tuple[float, tuple[Any, ...]]:
        # The cast weights must not be cached: the cache is common to all threads, and so would be their graphs.
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            loss = self.model.loss(inputs, targets) * weight
        return loss.item(), torch.autograd.grad(loss, self.parameters)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Set the gradients of the model for one batch; return the loss."""
        total = int((targets >= 0).sum())
        shares = [
            self.pool.submit(self._share, part, wanted, int((wanted >= 0).sum()) / total)
            for part, wanted in zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True)
            if bool((wanted >= 0).any())
        ]
        results = [share.result() for share in shares]
        for number, parameter in enumerate(self.parameters):
            parameter.grad = results[0][1][number]
            for _, gradients in results[1:]:
                parameter.grad.add_(gradients[number])
        return sum(loss for loss, _ in results)

    def step(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Let every optimizer take its step."""
        for done in [self.pool.submit(optimizer.step) for optimizer in optimizers]:
            done.result()


def learning_rate(progress: float, step: int, peak: float, warm_up: int = 150) -> float:
    """Return the rate: linear warm-up by steps, then a cosine over the time that was given."""
    return peak * min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(options: argparse.Namespace) -> None:
    """Run the training that ``options`` describe."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    shape = DRAFT if options.draft else Shape()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True) if options.resume else None
    if state or options.draft:
        tokenizer = Tokenizer.from_file(str((work if state else DEMO) / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(options.seed, shape)
    tokenizer.save(str(work / "tokenizer.json"))
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens", flush=True)
    model = Llama(shape).to(options.device)
    workers = Workers(model, options.threads, options.device)
    optimizers = make_optimizers(model, options.peak_rate, options.threads)
    step = seen = 0
    spent_before = 0.0
    if state:
        model.load_state_dict(state["model"])
        for optimizer, content in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        step, seen, spent_before = state["step"], state["seen"], state["spent"]
    print(f"model: {sum(p.numel() for p in model.parameters())} parameters, step {step}", flush=True)
    # A new seed per start: a resumed run must not repeat the text it has seen.
    source = batches(tokenizer, random.Random(f"train {options.seed} {step}"), options.batch_tokens, options.drills)
    # A restart with --restart-schedule treats the minutes as a new cosine, for continuing with another mixture.
    offset = 0.0 if options.restart_schedule else spent_before
    start = last_print = last_save = time.monotonic()
    loss_sum, loss_count, seen_at_print = 0.0, 0, seen

    def save() -> None:
        spent = spent_before + time.monotonic() - start
        content = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        torch.save({**content, "step": step, "seen": seen, "spent": spent}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
        write_folder(work / "model", model, tokenizer)

    while True:
        now = time.monotonic()
        progress = (now - start + offset) / (60 * options.minutes)
        if progress >= 1:
            break
        rate = learning_rate(progress, step, options.peak_rate)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * (ADAM_SHARE_OF_RATE if isinstance(optimizer, torch.optim.AdamW) else 1)
        inputs, targets = (tensor.to(options.device) for tensor in next(source))
        loss = workers.gradients(inputs, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        workers.step(optimizers)
        step += 1
        seen += inputs.numel()
        loss_sum, loss_count = loss_sum + loss, loss_count + 1
        if now - last_print > 20:
            speed = (seen - seen_at_print) / (now - last_print)
            print(
                f"{(now - start) / 60:5.1f} min  step {step}  {seen / 1e6:6.2f} M tokens  {speed:5.0f} tok/s  "
                f"rate {rate:.2e}  loss {loss_sum / loss_count:.4f}",
                flush=True,
            )
            last_print, loss_sum, loss_count, seen_at_print = now, 0.0, 0, seen
        if now - last_save > 60 * options.save_every:
            save()
            last_save = now
    save()
    write_folder(options.out, model, tokenizer)
    minutes = (spent_before + time.monotonic() - start) / 60
    print(f"done: {step} steps, {seen} tokens, {minutes:.1f} minutes", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="wall time of the training loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=DEMO, help="the model folder to write")
    parser.add_argument("--draft", action="store_true", help="a draft model for the demo model; give it an --out")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tidewheel-demo-training")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work")
    parser.add_argument("--restart-schedule", action="store_true", help="with --resume: a new schedule of --minutes")
    parser.add_argument("--threads", type=int, default=2, help="one share of each batch per thread; 1 with cuda")
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--peak-rate", type=float, default=4e-3)
    parser.add_argument("--drills", type=float, default=0.12, help="share of bare arithmetic and spelling")
    parser.add_argument("--save-every", type=float, default=4, help="minutes between checkpoints")
    options = parser.parse_args()
    if options.draft and options.out == DEMO:
        parser.error("--draft needs an --out of its own: the demo model lies in the default one")
    train(options)


if __name__ == "__main__":
    main()
