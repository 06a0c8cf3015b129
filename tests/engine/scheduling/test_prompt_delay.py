"""--scheduler-delay-factor: prompts wait while others run, and change no tokens by that."""

from __future__ import annotations

from engine.driving import Driver, Job
from engine.fake_executor import FakeExecutor

from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.prompt_delay import PromptDelay

LIMITS = ExecutorLimits(4, 64, 8, 64)
JOBS = [Job(tuple(range(start, start + 9)), SamplingParams(max_tokens=6, ignore_eos=True)) for start in (1, 50, 90)]


def test_prompts_wait_as_many_times_as_the_last_one_took() -> None:
    now = 0.0
    delay = PromptDelay(2.0, lambda: now)
    assert not delay.holds(is_idle=False)  # none took any time yet
    delay.admitted()
    now = 1.0
    delay.begin_step()
    assert delay.holds(is_idle=False)
    now = 2.9
    delay.begin_step()
    assert delay.holds(is_idle=False)
    assert not delay.holds(is_idle=True)
    now = 3.0
    assert not delay.holds(is_idle=False)
    delay.admitted()
    assert delay.holds(is_idle=False)  # the next one waits for itself


def test_the_next_prompts_start_together_when_nobody_runs() -> None:
    driver = Driver(FakeExecutor(LIMITS), 64, delay_factor=1e9)
    first = driver.add(JOBS[0])
    driver.step()
    others = [key for job in JOBS[1:] for key in driver.add(job)]
    while not driver.finished.keys() >= set(first):
        step = driver.step()
        assert step is not None
        assert not step.rows.chunks
    step = driver.step()
    assert step is not None
    assert [chunk.sequence.key for chunk in step.rows.chunks] == others
    driver.run()
    undelayed = Driver(FakeExecutor(LIMITS), 64)
    for job in JOBS:
        undelayed.add(job)
    undelayed.run()
    assert driver.sampled == undelayed.sampled


def test_without_a_factor_a_prompt_starts_beside_others() -> None:
    driver = Driver(FakeExecutor(LIMITS), 64)
    driver.add(JOBS[0])
    driver.step()
    driver.add(JOBS[1])
    step = driver.step()
    assert step is not None
    assert step.rows.chunks
    assert step.rows.decodes
