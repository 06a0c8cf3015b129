"""What the built-in model sees in pictures that clients send."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import ServerProcess

pytest.importorskip("PIL")
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))  # the scripts are not part of the installed package

from demo_model.pictures import article, draw_shape
from PIL import Image

COLOURS = {"red": (220, 20, 30), "green": (20, 150, 50), "black": (10, 10, 10), "orange": (250, 150, 20)}


def answer(server: ServerProcess, image: Image.Image, text: str = "What is in this picture?") -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 60}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


def canvas() -> Image.Image:
    return Image.new("RGB", (300, 300), (250, 250, 250))


@pytest.mark.parametrize(
    ("colour", "shape"), [("red", "circle"), ("green", "triangle"), ("black", "star"), ("orange", "diamond")]
)
def test_it_names_a_shape_and_its_colour(demo_server: ServerProcess, colour: str, shape: str) -> None:
    image = canvas()
    draw_shape(image, shape, COLOURS[colour], (150, 150), 90)
    assert answer(demo_server, image) == f"I see {article(colour)} {shape}."


def test_it_is_listed_as_a_model_that_sees(demo_server: ServerProcess) -> None:
    models: Any = httpx.get(f"{demo_server.url}/v1/models", trust_env=False).json()["data"]
    assert models[0]["input_modalities"] == ["text", "image"]


def test_text_alone_is_answered_as_before(demo_server: ServerProcess) -> None:
    body: Any = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
    response = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert response.json()["choices"][0]["message"]["content"] == "40 + 30 = 70, 7 + 8 = 15, so 47 + 38 = 85."
