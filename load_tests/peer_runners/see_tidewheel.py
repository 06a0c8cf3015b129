"""Tidewheel's runner of pictures: its engine, without the server around it."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import job
import pictures_job as pictures

if TYPE_CHECKING:
    from tidewheel.engine.devices.tower import TowerExecutor
    from tidewheel.engine.media.media import Media
    from tidewheel.engine.weights.dtypes import DType

_REPEATS = 3  # of decoding the large picture
_CEILING_S = 0.5
_CEILING_MB = 64


class Tidewheel:
    """An engine that runs on its own event loop."""

    def __init__(self, given: pictures.PicturesJob) -> None:
        from tidewheel import __version__
        from tidewheel.engine.declaring.mistakes import Mistakes
        from tidewheel.engine.loading.load import load_engine
        from tidewheel.server.options.model import engine_options, model_parser, read_model_options

        wanted: dict[str, Any] = {
            "model": given.model,
            "max_model_len": given.context,
            "max_num_seqs": 1,
            "threads_bind": ",".join(map(str, given.cpus)),
            "dtype" if given.weights in job.DTYPES else "quantization": given.weights,
        }
        parser = model_parser("--options", "Tidewheel's options")
        mistakes = Mistakes()
        asked = read_model_options(parser.read(shlex.split(given.options), mistakes), mistakes)
        parser.refuse(mistakes)
        self.version = __version__
        self._job = given
        self._loop = asyncio.new_event_loop()
        self._engine = load_engine(engine_options(wanted | asked))
        self._engine.start(self._loop)

    def ask(self, picture: Path, question: str) -> float:
        """Seconds from a file and a question to the first token of the answer, decoded greedily."""
        return self._loop.run_until_complete(self._ask(picture.read_bytes(), question))

    async def _ask(self, data: bytes, question: str) -> float:
        from tidewheel.engine.core.request import Request
        from tidewheel.engine.sampling_params import SamplingParams

        started = time.perf_counter()
        reader = self._engine.media
        assert reader is not None
        media = [await self._read(data)]
        expanded = reader.expand(self._job.prompt(question), media, "prompt")
        ids = self._engine.tokenizer.encode(expanded.text, add_special_tokens=False)
        prompt, spans = reader.spread(ids, expanded)
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        arrivals = [
            time.perf_counter() - started
            async for _ in self._engine.submit(Request("picture", prompt, sampling, media=spans))
        ]
        return arrivals[0]

    async def _read(self, data: bytes) -> Media:
        from tidewheel.engine.media.media import MediaFiles

        assert self._engine.media is not None
        return await self._engine.media.read(MediaFiles((data,)), "picture")

    def others(self) -> Iterator[tuple[str, Callable[[], pictures.Figures]]]:
        """The tower alone, which the idle engine leaves its threads, and the large picture."""
        towers = functools.cache(self._towers)
        yield pictures.TOWER, lambda: [seconds for seconds, _ in towers()]
        yield pictures.SHARE, lambda: [share for _, share in towers()]
        yield pictures.LARGE, lambda: [self._large(turn) for turn in range(_REPEATS)]

    def _towers(self) -> list[tuple[float, float]]:
        """For each picture the seconds, and the operations a second as a part of the ceiling's."""
        from tidewheel import _native
        from tidewheel.engine.devices.cpu.ceilings import compute_ceiling

        encoder = self._engine._encoder
        assert encoder is not None
        is_dtype = self._job.weights in job.DTYPES
        dtype = cast("DType", self._job.weights if is_dtype else "bfloat16")
        name = compute_ceiling(dtype, None, keeps_bits=not is_dtype)
        isa = _native.chosen_isa_level("auto")

        def ceiling() -> float:
            return _native.measure_ceilings(isa, self._job.cpus, _CEILING_S, _CEILING_MB)[name]

        tower, found, before = _counting(encoder._tower), [], ceiling()
        os.sched_setaffinity(0, self._job.cpus[:1])  # as the engine's thread is, which computes there
        for path in self._job.pictures[1:]:
            media = self._loop.run_until_complete(self._read(Path(path).read_bytes()))
            operations, started = tower.operations, time.perf_counter()
            for _ in encoder._vision.encode(media, tower):
                pass
            seconds, after = time.perf_counter() - started, ceiling()
            found.append((seconds, (tower.operations - operations) / seconds / max(before, after)))
            before = after
        os.sched_setaffinity(0, self._job.cpus)
        return found

    def _large(self, turn: int) -> float:
        """Decoding and resizing by the engine over the time that Pillow alone takes for it."""
        from PIL import Image

        data = Path(self._job.large).read_bytes() + bytes([turn])  # another file, of the same picture
        started = time.perf_counter()
        self._loop.run_until_complete(self._read(data))
        own = time.perf_counter() - started
        started = time.perf_counter()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        for width, height in self._job.resized:
            image.resize((width, height), Image.Resampling(self._job.resample))
        return own / (time.perf_counter() - started)


def _counting(tower: TowerExecutor) -> Any:
    """The tower, which also counts the `operations` of what it is asked for."""
    from tidewheel.engine.devices.tower import TowerExecutor
    from tidewheel.engine.models.spec import AttentionSpec

    class Counting(TowerExecutor):
        def __init__(self) -> None:
            self.spec = tower.spec
            self.operations = 0
            self._projections = dict(tower.spec.projections)

        def project(self, name: str, rows: Any) -> Generator[None, None, Any]:
            projection = self._projections[name]
            self.operations += 2 * len(rows) * projection.inputs * projection.outputs
            return (yield from tower.project(name, rows))

        def layer(
            self, index: int, rows: Any, segments: Any, positions: Any = None, **options: Any
        ) -> Generator[None, None, Any]:
            lengths = [int(length) for length in segments[1:] - segments[:-1]]
            for residual in self.spec.layers[index]:
                shapes = residual.shapes(self.spec.hidden_size).values()
                self.operations += 2 * len(rows) * sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
                if isinstance(mixer := residual.mixer, AttentionSpec):
                    width = mixer.num_heads * mixer.head_dim
                    self.operations += 4 * width * sum(length**2 for length in lengths)
            return (yield from tower.layer(index, rows, segments, positions, **options))

        def attend(self, name: str, queries: Any, keys: Any, values: Any) -> Generator[None, None, Any]:
            self.operations += 4 * len(queries) * len(keys) * queries.shape[1]
            return (yield from tower.attend(name, queries, keys, values))

        def table(self, name: str) -> Any:
            return tower.table(name)

        def close(self) -> None:
            pass

    return Counting()


if __name__ == "__main__":
    pictures.run(Tidewheel, *job.begin())
