"""Train eyes for the demo model: a small vision tower and a projector, while its own weights stay as they are.

First the tower learns what is in each patch (``--look-steps``). Then tower and projector learn what makes the frozen
decoder say the right sentence (``--tell-steps``). All pictures are drawn as they are needed, and none is seen twice.
One run of the script on one kind of machine gives the same weights again. The folder then is a LLaVA.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from . import corpus
from .chat import CHAT_TEMPLATE
from .corpus import LETTERS_OFF, LETTERS_ON, Conversation, Message
from .model import Llama, Shape
from .phrases import TRAIN, ask
from .pictures import COLOURS, DIGITS, KINDS, LETTERS, SHAPES, Picture, draw_picture
from .tower import Tower, TowerShape, squared
from .train import ADAM_SHARE_OF_RATE, DEMO, encode, learning_rate

IMAGE = "<image>"
QUESTIONS = (
    "what {is|do you see|can you see|can be seen} {in|on} {this|the} {picture|image|photo}",
    "what does {this|the} {picture|image|photo} show",
    "what do you see {here|}",
    "what is {this|that|it|here}",
    "{describe|explain} {this|the|my} {picture|image|photo}",
    "{describe|explain} {it|this|what you see|what is in the image}",
    "tell me what {you see|is in {the|this} {picture|image}}",
    "what does {it|this|the {picture|image|sign}} say",
    "{read|read out} {this|it|the {text|word|digits|numbers}}",
    "which {shape|shapes|digits|word|color|colors} {is|are} {this|that|there|in the {picture|image}}",
    "{caption|a caption|describe in one sentence}",
    "{look|look at this|here|see}",
)
_CLASSES = {name: number for number, name in enumerate(("", *SHAPES, *DIGITS, *LETTERS))}
_COLOURS = {name: number for number, name in enumerate(COLOURS)}
_NO_CLASS_WEIGHT = 0.15  # most patches show nothing
_LOOK_SHARE = 0.3  # of the first stage's loss, in the second one's
_POOL = 4  # batches whose conversations are sorted by length


def question(rng: random.Random, split: str) -> str:
    """Return what a user asks about a picture; often nothing."""
    return "" if rng.random() < 0.4 else ask(rng, QUESTIONS, split)


def _picture_turns(rng: random.Random, picture: Picture) -> list[Message]:
    asked = question(rng, TRAIN)
    said = picture.sentence
    if picture.kind == "word":  # one token for each letter
        word = "".join(part.what for part in picture.parts)
        said = said.replace(word, f"{LETTERS_ON}{word}{LETTERS_OFF}")
    content = IMAGE + asked if rng.random() < 0.8 else asked + IMAGE
    return [{"role": "user", "content": content}, {"role": "assistant", "content": said}]


def _text_turns(rng: random.Random) -> list[Message]:
    made = rng.choice((corpus.identity, corpus.small_talk, corpus.fact, corpus.addition))(rng, TRAIN)
    return [{"role": "user", "content": made.prompt}, {"role": "assistant", "content": made.answer}]


def training_conversation(rng: random.Random, kinds: Sequence[str]) -> tuple[Conversation, list[Picture]]:
    """Draw a conversation about a picture, or about two, sometimes with something else before it or behind it."""
    pictures = [draw_picture(rng, TRAIN, kinds)]
    messages = _picture_turns(rng, pictures[0])
    kind = rng.random()
    if kind < 0.03:
        pictures.append(draw_picture(rng, TRAIN, kinds))
        messages += _picture_turns(rng, pictures[1])
    elif kind < 0.06:
        messages = _text_turns(rng) + messages
    elif kind < 0.09:
        messages += _text_turns(rng)
    if rng.random() < 0.2:
        messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    return Conversation(messages), pictures


@dataclass
class Batch:
    """Pictures, what their patches show, and, in the second stage, the tokens of conversations about them."""

    kinds: list[str]
    images: Tensor  # [images, side, side, 3] bytes
    what: Tensor  # [images, patches], -1 where it is not clear
    colours: Tensor
    inputs: Tensor
    targets: Tensor


def _patch_labels(picture: Picture, grid: int) -> tuple[list[list[int]], list[list[int]]]:
    """The class and the colour of each patch; -1: anything may be said of it."""
    width, height = picture.image.size
    whole = max(width, height)
    what = [[0] * grid for _ in range(grid)]
    colours = [[-1] * grid for _ in range(grid)]
    for part in picture.parts:
        left, top, right, bottom = (edge * grid / whole for edge in part.box)
        x, y = (left + right + (whole - width) * grid / whole) / 2, (top + bottom + (whole - height) * grid / whole) / 2
        half = (right - left) / 2, (bottom - top) / 2
        for row in range(grid):
            for column in range(grid):
                far = abs(column + 0.5 - x) / half[0], abs(row + 0.5 - y) / half[1]
                if max(far) < 0.5 or (int(y), int(x)) == (row, column):
                    what[row][column] = _CLASSES[part.what]
                    colours[row][column] = _COLOURS.get(part.colour, -1)
                elif max(far) < 1.2 and what[row][column] == 0:
                    what[row][column] = -1
    return what, colours


def _batch(
    pictures: list[Picture], shape: TowerShape, rows: list[tuple[list[int], list[bool]]], image_id: int
) -> Batch:
    labels = [_patch_labels(picture, shape.grid) for picture in pictures]
    spread = []
    for ids, learned in rows:
        counts = [shape.grid**2 if token == image_id else 1 for token in ids]
        spread.append(
            (
                [token for token, count in zip(ids, counts, strict=True) for _ in range(count)],
                [flag for flag, count in zip(learned, counts, strict=True) for _ in range(count)],
            )
        )
    width = max((len(ids) for ids, _ in spread), default=0)
    inputs = torch.zeros((len(spread), width), dtype=torch.long)
    targets = torch.full((len(spread), width), -1)
    for number, (ids, learned) in enumerate(spread):
        inputs[number, : len(ids)] = torch.tensor(ids)
        wanted = [token if flag else -1 for token, flag in zip(ids[1:], learned[1:], strict=True)]
        targets[number, : len(wanted)] = torch.tensor(wanted)
    what, colours = (torch.tensor([label[part] for label in labels]).flatten(1) for part in range(2))
    images = torch.from_numpy(np.stack([squared(picture.image, shape.image) for picture in pictures]))
    return Batch([picture.kind for picture in pictures], images, what, colours, inputs, targets)


def look_batches(seed: int, count: int, shape: TowerShape) -> Iterator[Batch]:
    """Yield batches of the first stage, of ``count`` pictures each."""
    rng = random.Random(f"look {seed}")
    while True:
        yield _batch([draw_picture(rng, TRAIN, KINDS) for _ in range(count)], shape, [], -1)


def tell_batches(
    seed: int, count: int, shape: TowerShape, tokenizer: Tokenizer, kinds: Sequence[str]
) -> Iterator[Batch]:
    """Yield batches of the second stage, of ``count`` conversations each. Those of a batch are of similar length."""
    rng = random.Random(f"tell {seed}")
    image_id = image_token(tokenizer)
    while True:
        drawn = [training_conversation(rng, kinds) for _ in range(_POOL * count)]
        rows = encode(tokenizer, [conversation for conversation, _ in drawn])
        order = sorted(range(len(drawn)), key=lambda number: (len(drawn[number][1]), len(rows[number][0])))
        groups = [order[at : at + count] for at in range(0, len(order), count)]
        rng.shuffle(groups)
        for group in groups:
            pictures = [picture for number in group for picture in drawn[number][1]]
            yield _batch(pictures, shape, [rows[number] for number in group], image_id)


class Student(nn.Module):
    """The tower, and what only training needs: heads that say what a patch shows."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.tower = Tower(shape)
        self.norm = nn.LayerNorm(shape.hidden)
        self.what = nn.Linear(shape.hidden, len(_CLASSES))
        self.colours = nn.Linear(shape.hidden, len(_COLOURS))
        self.register_buffer("weights", torch.tensor([_NO_CLASS_WEIGHT] + [1.0] * (len(_CLASSES) - 1)))

    def look(self, batch: Batch, features: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of saying what patches show, and the shares that are right."""
        normed = self.norm(features).flatten(0, 1)
        what, colours = self.what(normed).float(), self.colours(normed).float()
        wanted, wanted_colours = batch.what.flatten(), batch.colours.flatten()
        loss = functional.cross_entropy(what, wanted, self.get_buffer("weights"), ignore_index=-1)
        loss = loss + functional.cross_entropy(colours, wanted_colours, ignore_index=-1)
        found = what.argmax(-1) == wanted
        first_digit, first_letter = _CLASSES[DIGITS[0]], _CLASSES[LETTERS[0]]
        shares = {
            "nothing": found[wanted == 0],
            "shapes": found[(wanted > 0) & (wanted < first_digit)],
            "digits": found[(wanted >= first_digit) & (wanted < first_letter)],
            "letters": found[wanted >= first_letter],
            "colours": (colours.argmax(-1) == wanted_colours)[wanted_colours >= 0],
        }
        return loss, {name: right.float().mean().item() for name, right in shares.items()}

    def tell(self, batch: Batch, features: Tensor, decoder: Llama, image_id: int) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of the decoder's answers, and the shares of conversations without a wrong token."""
        rows = self.tower.embeddings(features).flatten(0, 1).to(torch.bfloat16)
        x = decoder.embedding(batch.inputs).masked_scatter((batch.inputs == image_id)[..., None], rows)
        wanted = batch.targets >= 0
        with torch.autocast("cpu", enabled=False):
            logits = decoder.logits(decoder.states(x)[wanted])
        loss = functional.cross_entropy(logits, batch.targets[wanted])
        wrong = torch.zeros_like(wanted)
        wrong[wanted] = logits.argmax(-1) != batch.targets[wanted]
        right = (~wrong.any(-1)).float()
        if len(right) != len(batch.kinds):  # two pictures a conversation
            return loss, {"two": right.mean().item()}
        kinds = {kind: [number for number, of in enumerate(batch.kinds) if of == kind] for kind in KINDS}
        return loss, {kind: right[numbers].mean().item() for kind, numbers in kinds.items() if numbers}


def load_decoder(folder: Path) -> tuple[Llama, dict[str, Tensor]]:
    """Return the frozen decoder of a folder, and its weights as they are there, by the names of a Llama."""
    stored = load_file(folder / "model.safetensors")
    weights = {
        name.removeprefix("language_model."): weight
        for name, weight in stored.items()
        if not name.startswith(("vision_tower.", "multi_modal_projector."))
    }
    decoder = Llama(Shape())
    decoder.load_hugging_face_weights(weights)
    return decoder.to(torch.bfloat16).requires_grad_(requires_grad=False), weights


def tokenizer_with_image(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder with a token for images. The embedding has room for it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, normalized=False, special=True)])
    return tokenizer


def image_token(tokenizer: Tokenizer) -> int:
    """Return the id of the token for images of such a tokenizer."""
    found = tokenizer.token_to_id(IMAGE)
    assert found is not None
    return found


def write_folder(out: Path, source: Path, tower: Tower, tokenizer: Tokenizer, text_weights: dict[str, Tensor]) -> None:
    """Write the demo model of ``source`` with the tower, as a LLaVA that Hugging Face reads too."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config", config)
    shape = tower.shape
    image_id = image_token(tokenizer)
    whole = {
        "architectures": ["LlavaForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_seq_length": shape.grid**2,
        "image_token_index": image_id,
        "model_type": "llava",
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": text_config,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": tower.config(),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    images = {
        "do_center_crop": False,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "LlavaImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": shape.image, "width": shape.image},
    }
    processor = {
        "image_token": IMAGE,
        "num_additional_image_tokens": 0,
        "patch_size": shape.patch,
        "processor_class": "LlavaProcessor",
        "vision_feature_select_strategy": "full",
    }
    generation = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
    tokenizer_config: dict[str, Any] = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    entry = {"content": IMAGE, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokenizer_config["added_tokens_decoder"][str(image_id)] = entry | {"special": True}
    tokenizer_config["chat_template"] = CHAT_TEMPLATE
    for name, content in (
        ("config.json", whole),
        ("generation_config.json", generation),
        ("preprocessor_config.json", images),
        ("processor_config.json", processor),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {f"language_model.{name}": weight for name, weight in text_weights.items()}
    save_file(weights | tower.hugging_face_weights(), str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file lets no other user read


def make_optimizers(student: Student, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices within the network, and AdamW for what is at its ends and for vectors."""
    inner = ("tower.blocks", "tower.merge", "tower.connector")
    matrices = [p for name, p in student.named_parameters() if p.dim() == 2 and name.startswith(inner)]
    others = [p for name, p in student.named_parameters() if not (p.dim() == 2 and name.startswith(inner))]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def begin_as_words(tower: Tower, decoder: Llama, tokenizer: Tokenizer) -> None:
    """Let the rows of an image begin near the embeddings of words for it, which the decoder is used to."""
    words = tokenizer.encode(" ".join(("I see", *COLOURS, *SHAPES)), add_special_tokens=False).ids
    with torch.no_grad():
        tower.connector.weight.mul_(0.2)
        tower.connector.bias.copy_(decoder.embedding.weight[words].mean(0))


def run_stage(
    name: str, student: Student, batches: Iterator[Batch], steps: int, peak: float, loss_of: Any, kept: Path
) -> None:
    """Train for ``steps``, and keep the state now and then; what is logged is of pictures that were not seen before."""
    optimizers = make_optimizers(student, peak)
    means: dict[str, float] = {}
    start = last = time.monotonic()
    for step in range(steps):
        rate = learning_rate(step / steps, step, peak, max(1, steps // 20))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * (ADAM_SHARE_OF_RATE if isinstance(optimizer, torch.optim.AdamW) else 1)
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss, shares = loss_of(batch, student.tower.features(batch.images))
        student.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for key, value in {"loss": loss.item(), **shares}.items():
            if value == value:  # no picture of that kind
                means[key] = value if key not in means else 0.95 * means[key] + 0.05 * value
        now = time.monotonic()
        if now - last > 20 or step == steps - 1:
            shown = "  ".join(f"{key} {value:.3f}" for key, value in means.items())
            print(f"{name} {(now - start) / 60:5.1f} min  step {step + 1}/{steps}  {shown}", flush=True)
            last = now
        if (step + 1) % 100 == 0 or step == steps - 1:
            torch.save(student.state_dict(), kept)


def train(options: argparse.Namespace) -> None:
    """Run the training that ``options`` describe."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    shape = TowerShape()
    tokenizer = tokenizer_with_image(options.model)
    decoder, text_weights = load_decoder(options.model)
    student = Student(shape)
    options.work.mkdir(parents=True, exist_ok=True)
    told_state = options.work / "told.pt"
    print(f"tower and projector: {sum(p.numel() for p in student.tower.parameters())} parameters", flush=True)
    if options.resume:
        student.load_state_dict(torch.load(told_state, weights_only=True))
    else:
        batches = look_batches(options.seed, options.look_batch, shape)
        run_stage("look", student, batches, options.look_steps, options.look_rate, student.look, told_state)
        begin_as_words(student.tower, decoder, tokenizer)
    image_id = image_token(tokenizer)

    def told(batch: Batch, features: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss, shares = student.tell(batch, features, decoder, image_id)
        return loss + _LOOK_SHARE * student.look(batch, features)[0], shares

    batches = tell_batches(options.seed, options.tell_batch, shape, tokenizer, options.kinds.split(","))
    run_stage("tell", student, batches, options.tell_steps, options.tell_rate, told, told_state)
    write_folder(options.out, options.model, student.tower, tokenizer, text_weights)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="the demo model, with eyes or without")
    parser.add_argument("--out", type=Path, default=DEMO, help="the model folder to write")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tidewheel-demo-eyes")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the second stage, with pictures of another seed"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of pictures in the second stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look-steps", type=int, default=700)
    parser.add_argument("--look-batch", type=int, default=64)
    parser.add_argument("--look-rate", type=float, default=3e-3)
    parser.add_argument("--tell-steps", type=int, default=1600)
    parser.add_argument("--tell-batch", type=int, default=16)
    parser.add_argument("--tell-rate", type=float, default=2e-3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
