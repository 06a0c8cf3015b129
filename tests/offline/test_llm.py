"""LLM: the server's answers without a server, in vLLM's shapes."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import httpx
import numpy as np
import pytest
from samples import swept
from server.conftest import ServerProcess

from tidewheel import (
    LLM,
    BeamSearchParams,
    GuidedDecodingParams,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TidewheelError,
    TokensPrompt,
)
from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.offline.hf_config import HfConfig
from tidewheel.server.options.model import DEMO_MODEL

PROMPTS = ["The wheel turns", "One, two, three,", "Café, naïve: 潮"]
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Spell the word tide."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    encoders = [str(zoo.folder("bert")), str(zoo.folder("bert-cross"))]
    names = ["embed", "rank"]
    with LLM(max_num_seqs=8, max_model_len="1k", embedding_model=encoders, served_embedding_model_name=names) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    process = ServerProcess("--max-num-seqs", "8", "--max-model-len", "1k")
    with httpx.Client(base_url=process.url, timeout=60, trust_env=False) as client:
        yield client
    process.stop()


def generate(llm: LLM, prompts: Any, params: Any = None, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def answered(server: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_seed_of_the_engine_makes_starts_alike() -> None:
    def answers(seed: int | None) -> list[tuple[int, ...]]:
        with LLM(kv_cache_space=0.05, seed=seed) as started:
            params = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
            return [tuple(output.outputs[0].token_ids) for output in generate(started, PROMPTS[:1] * 3, params)]

    first = answers(3)
    assert answers(3) == first
    assert len(set(first)) == 3  # the n-th request draws the n-th seed
    assert first not in (answers(4), answers(None))


def test_what_ends_an_answer_may_be_overridden(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    whole = generate(llm, PROMPTS[0], params)[0].outputs[0]
    last = whole.token_ids[3]
    with LLM(kv_cache_space=0.05, hf_overrides={"eos_token_id": last}) as other:
        short = generate(other, PROMPTS[0], params)[0].outputs[0]
    assert short.finish_reason == "stop"
    assert short.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
    assert "eos_token_id" not in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 7, "n": 3, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"seed": 1, "ignore_eos": True, "min_tokens": 20, "stop": ["e", "the"], "include_stop_str_in_output": True},
        {"temperature": 0, "stop_token_ids": [15, 12], "skip_special_tokens": False},
        {"seed": 2, "bad_words": [" the"], "allowed_token_ids": list(range(300))},
        {"seed": 5, "truncate_prompt_tokens": 2},
    ],
    ids=str,
)
def test_answers_are_those_of_the_server(llm: LLM, server: httpx.Client, fields: dict[str, Any]) -> None:
    defaults = {"temperature": 1.0, "top_p": 1.0}  # SamplingParams' own; requests would get the model's
    body = {**defaults, **fields, "prompt": PROMPTS, "max_tokens": 24, "return_token_ids": True}
    choices = answered(server, "/v1/completions", body)["choices"]
    outputs = generate(llm, PROMPTS, SamplingParams(**fields, max_tokens=24))
    assert [output.prompt for output in outputs] == PROMPTS
    got = [(output, one) for output in outputs for one in output.outputs]
    for choice, (output, one) in zip(choices, got, strict=True):
        assert output.finished
        assert output.prompt_token_ids == choice["prompt_token_ids"]
        assert (one.text, one.token_ids) == (choice["text"], choice["token_ids"])
        assert (one.finish_reason, one.stop_reason) == (choice["finish_reason"], choice["stop_reason"])


# A server starts.
@pytest.mark.sweep
@pytest.mark.parametrize(
    "by",
    [["--speculative-config.method", "ngram"], ["--speculative-model", str(DEMO_MODEL)]],
    ids=["ngram", "model"],
)
def test_draft_tokens_change_no_answer(llm: LLM, by: list[str]) -> None:
    """The metrics show that it drafted, and the answers are the same as without drafts."""
    prompts = ["The wheel turns. The wheel turns. The wheel", "a b c d e f g h a b c d", PROMPTS[2]]
    sampled = [
        {"temperature": 0.0},
        {"temperature": 0.3, "seed": 7, "n": 2},
        {"temperature": 0, "frequency_penalty": 0.5},
    ]
    process = ServerProcess("--max-model-len", "1k", *by)
    try:
        with httpx.Client(base_url=process.url, timeout=60, trust_env=False) as drafting:
            for fields in sampled:
                body = {"top_p": 1.0, **fields, "prompt": prompts, "max_tokens": 60, "logprobs": 2, "ignore_eos": True}
                choices = answered(drafting, "/v1/completions", {**body, "return_token_ids": True})["choices"]
                outputs = generate(llm, prompts, SamplingParams(**fields, max_tokens=60, logprobs=2, ignore_eos=True))
                for choice, one in zip(choices, [one for output in outputs for one in output.outputs], strict=True):
                    assert choice["token_ids"] == one.token_ids
                    places = zip(one.token_ids, one.logprobs or (), strict=True)
                    assert choice["logprobs"]["token_logprobs"] == [place[token].logprob for token, place in places]
            metrics = drafting.get("/metrics").text
    finally:
        process.stop()
    counted = dict(re.findall(r"^tidewheel:spec_decode_num_(\w+)_total\{.*\} (\S+)$", metrics, re.MULTILINE))
    drafts, draft_tokens, right = (float(counted[name]) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert 0 < drafts <= draft_tokens
    assert 0 < right <= draft_tokens
    if "--speculative-model" in by:
        assert right == draft_tokens, "the model is its own draft model"


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "[a-f]{4}-[0-9]{2}"},
        {"choice": ["ebb", "flow"]},
        {"json": {"type": "object", "properties": {"tide": {"type": "integer"}}, "required": ["tide"]}},
    ],
    ids=str,
)
def test_structured_answers_are_those_of_the_server(llm: LLM, server: httpx.Client, wanted: dict[str, Any]) -> None:
    body = {"messages": SAID, "structured_outputs": wanted, "seed": 4, "max_tokens": 40, "return_token_ids": True}
    [choice] = answered(server, "/v1/chat/completions", {**body, "temperature": 1, "top_p": 1})["choices"]
    params = SamplingParams(seed=4, max_tokens=40, structured_outputs=StructuredOutputsParams(**wanted))
    [output] = llm.chat(SAID, params, use_tqdm=False)
    assert output.outputs[0].token_ids == choice["token_ids"]
    assert output.outputs[0].text == choice["message"]["content"]


def test_conversations_are_those_of_the_server(llm: LLM, server: httpx.Client) -> None:
    defaults = llm.get_default_sampling_params()
    assert defaults.temperature != SamplingParams().temperature  # else this would show nothing
    defaults.seed = 9
    body = {"messages": SAID, "seed": 9, "max_tokens": 16, "return_token_ids": True}
    [choice] = answered(server, "/v1/chat/completions", body)["choices"]
    one, other = llm.chat([SAID, SAID], defaults, use_tqdm=False)
    assert one.outputs[0].token_ids == other.outputs[0].token_ids == choice["token_ids"]
    [templated] = llm.chat(SAID, defaults, use_tqdm=False, chat_template="{{ messages[1].content }}")
    assert templated.prompt == SAID[1]["content"]


def test_beams_are_those_of_the_server(llm: LLM, server: httpx.Client) -> None:
    body = {"prompt": PROMPTS[0], "use_beam_search": True, "n": 3, "max_tokens": 8, "temperature": 0}
    choices = answered(server, "/v1/completions", {**body, "return_token_ids": True, "logprobs": 0})["choices"]
    [found] = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=8))
    for choice, beam in zip(choices, found.sequences, strict=True):
        assert beam.tokens == [*choices[0]["prompt_token_ids"], *choice["token_ids"]]
        assert beam.cum_logprob == pytest.approx(sum(choice["logprobs"]["token_logprobs"]))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"structured_outputs": StructuredOutputsParams(regex="a+")},
            "structured_outputs is not supported: .*generate",
        ),
        ({"watermarking": True}, "watermarking is not supported: an answer has text"),
    ],
    ids=str,
)
def test_parameters_of_a_search_that_cannot_be_served(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        BeamSearchParams(beam_width=2, max_tokens=4, **fields)


@pytest.mark.parametrize("skips", [True, False])
def test_beams_show_special_tokens_if_they_are_to(llm: LLM, skips: bool) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True, skip_special_tokens=skips)
    [found] = llm.beam_search(PROMPTS[0], params)
    prompt = llm.get_tokenizer().encode(PROMPTS[0])
    texts = [
        llm.get_tokenizer().decode(beam.tokens[len(prompt) :], skip_special_tokens=skips) for beam in found.sequences
    ]
    assert [beam.text for beam in found.sequences] == texts
    assert any("<|im_end|>" in text for text in texts) != skips


def test_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    [output] = generate(llm, PROMPTS[0], params)
    [one] = output.outputs
    assert one.logprobs is not None
    assert one.cumulative_logprob == pytest.approx(
        sum(place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True))
    )
    for token, place in zip(one.token_ids, one.logprobs, strict=True):
        assert [entry.rank for entry in place.values()] == [1, 2, 3]
        assert place[token].rank == 1
        assert place[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
    first, *rest = output.prompt_logprobs or []
    assert first is None
    assert all(place and token in place for token, place in zip(output.prompt_token_ids[1:], rest, strict=True))


def test_tokens_are_those_of_transformers() -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with LLM(str(DEMO_MODEL), dtype="float", max_num_seqs=4) as llm:
        outputs = generate(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


def test_vectors_are_those_of_transformers(llm: LLM) -> None:
    texts = zoo.texts(12, most=14)
    counted: list[int] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            assert options["total"] == len(texts)

        def update(self, count: int) -> None:
            counted.append(count)

        def close(self) -> None:
            counted.append(0)

    outputs = llm.embed(texts, use_tqdm=Bar)
    assert (sum(counted), counted[-1]) == (12, 0)
    vectors = np.array([output.outputs.embedding for output in outputs], np.float32)
    np.testing.assert_allclose(vectors, zoo.reference("bert", texts), rtol=1e-4, atol=2e-5)
    [short] = llm.embed(texts[0], dimensions=4, use_tqdm=False)
    assert short.outputs.hidden_size == 4
    scores = [output.outputs.score for output in llm.score(texts[0], texts, use_tqdm=False)]
    pairs = [(texts[0], text) for text in texts]
    logits = zoo.reference("bert-cross", pairs)[:, 0]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), rtol=1e-3, atol=1e-4)
    cosines = [output.outputs.score for output in llm.score(texts[:3], texts[:3], model="embed", use_tqdm=False)]
    np.testing.assert_allclose(cosines, 1, atol=1e-5)


def test_vectors_as_arrays(llm: LLM) -> None:
    ids = llm.embed("the tide", use_tqdm=False)[0].prompt_token_ids
    prompts: list[Any] = ["the tide", ids, {"prompt": "the tide"}, {"prompt_token_ids": ids}]
    [expected, *_] = llm.embed(prompts, dimensions=4, normalize=True, use_tqdm=False)
    [first] = llm.encode("the tide", use_tqdm=False)  # by the first model, although there is a cross-encoder
    [same] = llm.embed("the tide", use_tqdm=False)
    assert first.outputs.data.tolist() == same.outputs.embedding
    params = PoolingParams(dimensions=4, use_activation=True, task="embed")
    for output in llm.encode(prompts, params, use_tqdm=False):
        assert (output.outputs.data.shape, output.finished) == ((4,), True)
        assert output.outputs.data.tolist() == expected.outputs.embedding
    [output] = llm.embed("the tide", pooling_params=params, dimensions=3, use_tqdm=False)
    assert output.outputs.hidden_size == 3
    other = "pooling_params have the task embed, and this call is for "
    with pytest.raises(InvalidRequestError, match=other + "classify: leave it out, or use encode"):
        llm.classify("the tide", pooling_params=params)
    with pytest.raises(InvalidRequestError, match=other + "token_classify"):
        llm.reward("the tide", pooling_params=params)
    with pytest.raises(InvalidRequestError, match="the task classify, and this call is for embed"):
        llm.embed("the tide", pooling_params=PoolingParams(task="classify"))
    with pytest.raises(InvalidRequestError, match="one PoolingParams for all prompts"):
        llm.encode(prompts, [params], use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"tokens: embed has embed\(\), .*; rank has classify\(\), "):
        llm.encode(prompts, pooling_task="token_classify")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"task": "cluster"}, "task='cluster' is not known: it must be one of embed, "),
        ({"softmax": True, "activation": False}, "use_activation contradicts"),
        ({"step_tag_id": 0}, "step_tag_id is not supported: answers have all tokens"),
        ({"late_interaction_params": ["q"]}, "late_interaction_params is not supported: .*token_embed"),
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind must be RequestOutputKind.FINAL_ONLY, got .*DELTA"),
        ({"normalize": True, "use_activation": False}, "use_activation contradicts normalize"),
    ],
    ids=str,
)
def test_parameters_of_vectors_that_cannot_be_used(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        PoolingParams(**fields)


def test_parameters_of_vectors_without_effect(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    given = {"requires_token_ids": True, "skip_reading_prefix_cache": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    params = PoolingParams(dimensions=4, **given)
    assert params.clone() == params
    [output] = llm.embed("the tide", pooling_params=params.clone(), use_tqdm=False)
    [expected] = llm.embed("the tide", dimensions=4, use_tqdm=False)
    assert output.outputs.embedding == expected.outputs.embedding
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "requires_token_ids has no effect", "skip_reading_prefix_cache has no effect",
    ]  # fmt: skip


def test_the_tokenizer_renders_conversations_as_chat_does(llm: LLM) -> None:
    tokenizer, params = llm.get_tokenizer(), SamplingParams(max_tokens=1)
    tools = [{"type": "function", "function": {"name": "tides", "parameters": {"type": "object"}}}]
    spoken = [*SAID, {"role": "assistant", "content": "t, i"}]
    for said, options in (
        (SAID, {"add_generation_prompt": True}),
        (SAID, {"add_generation_prompt": False}),
        (SAID, {"add_generation_prompt": True, "tools": tools}),
        (spoken, {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        [output] = llm.chat(said, params, use_tqdm=False, **options)  # type: ignore[arg-type]
        assert tokenizer.apply_chat_template(said, tokenize=False, **options) == output.prompt  # type: ignore[arg-type]
        assert tokenizer.apply_chat_template(said, **options) == output.prompt_token_ids  # type: ignore[arg-type]
    both = tokenizer.apply_chat_template([SAID, spoken], tokenize=False)
    assert both == [tokenizer.apply_chat_template(said, tokenize=False) for said in (SAID, spoken)]
    own = "{{ messages[1].content }}{{ mood }}"
    assert tokenizer.apply_chat_template(SAID, chat_template=own, tokenize=False, mood="!") == f"{SAID[1]['content']}!"
    with pytest.raises(InvalidRequestError, match=r"encode\(\) gives the token ids"):
        tokenizer("the tide", return_tensors="pt")
    with pytest.raises(InvalidRequestError, match="return_tensors is not supported: the result is token ids"):
        tokenizer.apply_chat_template(SAID, return_tensors="pt")
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role"):
        tokenizer.apply_chat_template([{"role": "wheel", "content": "x"}])


def test_a_chat_template_that_is_set_is_for_all_conversations(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    before = tokenizer.chat_template
    assert isinstance(before, str)
    try:
        tokenizer.chat_template = "{{ messages[1].content }}"
        [output] = llm.chat(SAID, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt == SAID[1]["content"] == tokenizer.apply_chat_template(SAID, tokenize=False)
        assert llm.get_tokenizer().chat_template == tokenizer.chat_template
    finally:
        tokenizer.chat_template = before
    assert tokenizer.apply_chat_template(SAID, tokenize=False) != SAID[1]["content"]


VLLMS_LLM = (
    "apply_model beam_search chat classify collective_rpc embed encode enqueue enqueue_chat from_engine_args generate "
    "get_default_sampling_params get_metrics get_tokenizer get_world_size init_weight_transfer_engine llm_engine "
    "model_config preprocess_chat reset_mm_cache reset_prefix_cache reward score set_tokenizer sleep start_profile "
    "stop_profile update_weights wait_for_completion wake_up"
).split()


@pytest.mark.parametrize("name", VLLMS_LLM)
def test_a_name_of_vllms_works_or_says_what_to_do(llm: LLM, name: str) -> None:
    if not hasattr(llm, name):
        with pytest.raises(InvalidRequestError, match=rf"^LLM\.{name} is not supported: .{{9}}"):
            getattr(llm, name)


def test_what_nobody_has_is_an_attribute_error(llm: LLM) -> None:
    for thing in (llm, llm.llm_engine, llm.get_tokenizer()):
        with pytest.raises(AttributeError, match="object has no attribute 'wheel'"):
            thing.wheel  # type: ignore[attr-defined]  # noqa: B018
    assert llm.llm_engine.model_config.max_model_len == llm.model_config.max_model_len == 1000
    assert llm.model_config.get_vocab_size() >= llm.get_tokenizer().vocab_size == len(llm.get_tokenizer())


def test_the_config_of_a_model_is_an_object(llm: LLM) -> None:
    config = llm.model_config.hf_config
    assert config.to_dict()["model_type"] == config.model_type
    assert config.architectures == config.to_dict()["architectures"]
    assert llm.model_config.hf_text_config is not None
    assert HfConfig({"text_config": {"hidden_size": 8}, "quantization_config": {}}).get_text_config().hidden_size == 8
    with pytest.raises(AttributeError, match=r"config\.json has no tide"):
        _ = config.tide


def test_a_classifier_alone() -> None:
    texts = ["the tide is high", "corn"]
    with LLM(str(zoo.folder("bert-classes"))) as llm:
        logits = zoo.reference("bert-classes", texts)
        outputs = [output.outputs for output in llm.classify(texts, use_tqdm=False)]
        assert outputs[0].num_classes == 3
        powers = np.exp(logits)
        np.testing.assert_allclose([one.probs for one in outputs], powers / powers.sum(1, keepdims=True), atol=1e-4)
        raw = llm.encode(texts, PoolingParams(task="classify", softmax=False), use_tqdm=False)
        np.testing.assert_allclose([one.outputs.data for one in raw], logits, atol=1e-4)
        assert llm.encode("corn", use_tqdm=False)[0].outputs.data.tolist() == outputs[1].probs
        with pytest.raises(InvalidRequestError, match="there is no model for embeddings"):
            llm.embed("corn")
        with pytest.raises(InvalidRequestError, match="there is no model for classes of tokens"):
            llm.reward("corn")
        with pytest.raises(InvalidRequestError, match="dimensions are of vectors"):
            llm.classify("corn", pooling_params=PoolingParams(dimensions=2))


def test_an_embedding_model_alone() -> None:
    with LLM(str(zoo.folder("bert")), pooler_config={"dimensions": 4}) as llm:
        vectors = [output.outputs.embedding for output in llm.embed(["the tide", "the corn"], use_tqdm=False)]
        assert [len(vector) for vector in vectors] == [4, 4]
        [tokens] = llm.encode("the tide", pooling_task="token_embed", use_tqdm=False)
        assert tokens.outputs.data.shape == (len(tokens.prompt_token_ids), 4)
        np.testing.assert_allclose(np.linalg.norm(tokens.outputs.data, axis=1), 1, rtol=1e-5)
        with pytest.raises(InvalidRequestError, match="runner='pooling'"):
            generate(llm, "the tide")


def test_many_prompts_come_back_in_their_order(llm: LLM) -> None:
    prompts = [f"{i} and" for i in range(300)]
    params = [SamplingParams(seed=i, max_tokens=1 + i % 5, ignore_eos=True) for i in range(300)]
    outputs = generate(llm, prompts, params, priority=[-i for i in range(300)])
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 5 for i in range(300)]
    assert len({output.request_id for output in outputs}) == 300
    alone = generate(llm, prompts[137], params[137])[0]
    assert alone.outputs[0].token_ids == outputs[137].outputs[0].token_ids


def test_kinds_of_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.get_tokenizer().encode("The wheel")
    salted = TextPrompt(prompt="The wheel", cache_salt="me")
    kinds: list[Any] = ["The wheel", ids, salted, TokensPrompt(prompt_token_ids=ids)]
    outputs = generate(llm, kinds, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt is None for output in outputs] == [False, True, False, True]
    assert generate(llm, ids, params)[0].prompt_token_ids == ids
    assert generate(llm, [], params) == []
    assert generate(llm, "The wheel", SamplingParams(detokenize=False))[0].outputs[0].text == ""


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "no tokens"),
        ([10**6], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
        ([5] * 2000, "context is 1000"),
        ({"text": "x"}, "prompt's text is not supported"),
        ({"prompt": "x", "multi_modal_data": {"audio": [1]}}, "multi_modal_data.audio is not supported"),
        (
            {"prompt": "x", "multi_modal_data": {"image": b"PNG"}},
            "cannot be read as an image: it is of no known format",
        ),
        ({"prompt": "x", "mm_processor_kwargs": {"a": 1}}, "this prompt has no multi_modal_data"),
        ([1.5], "a text, a list of token ids"),
    ],
)
def test_prompts_that_cannot_be_served(llm: LLM, prompt: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        generate(llm, ["fine", prompt])
    assert generate(llm, "fine")[0].finished


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"temperature": -1}, "temperature must be between"),
        ({"temperature": "hot"}, "temperature: expected `float"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"logprobs": -2}, "logprobs must be at least 0"),
        ({"logits_processors": [print]}, "use logit_bias"),
        ({"guided_decoding": {}}, "guided_decoding must be StructuredOutputsParams, got dict"),
        (
            {"guided_decoding": GuidedDecodingParams(), "structured_outputs": StructuredOutputsParams()},
            "give one of them",
        ),
        ({"extra_args": {"a": 1}}, "extra_args is not supported"),
        ({"use_beam_search": True}, r"LLM.beam_search\(\) searches"),
        ({"thinking_token_budget": 9}, "thinking_token_budget is not supported: max_tokens"),
        ({"thinking_token_budget": 0}, "thinking_token_budget is not supported: max_tokens"),
        ({"routed_experts_prompt_start": 5}, "routed_experts_prompt_start is not supported: "),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is not supported: logprobs=-1"),
        ({"n": 2, "best_of": 3}, "best_of must be n, which is 2, got 3"),
        ({"detokenize": False, "stop": "x"}, "stop needs detokenize"),
        ({"logit_bias": {5: 1000}}, "logit_bias must be between"),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_served(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        SamplingParams(**fields)


def test_parameters_without_effect(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        params = SamplingParams(
            max_tokens=2,
            skip_clone=True,
            stream_interval=4,
            thinking_token_budget=None,
            routed_experts_prompt_start=0,
        )
        assert generate(llm, "The tide", params)[0].outputs[0].token_ids
    assert caplog.text.count("skip_clone has no effect: ") == caplog.text.count("stream_interval has no effect: ") == 1


def test_the_old_names_of_other_things_mean_the_same(llm: LLM) -> None:
    params = SamplingParams.from_optional(temperature=0, max_tokens=4, n=2, best_of=2, seed=None)
    assert params.clone() == params == SamplingParams(temperature=0, max_tokens=4, n=2, best_of=2)
    ids = [[5, 6, 7], [8, 9]]
    old = generate(llm, None, params, prompt_token_ids=ids)
    assert [one.outputs[0].token_ids for one in old] == [o.outputs[0].token_ids for o in generate(llm, ids, params)]
    for given in ({}, {"prompts": "a", "prompt_token_ids": [5]}):
        with pytest.raises(InvalidRequestError, match="either prompts or prompt_token_ids"):
            llm.generate(**given)


def test_the_old_name_of_structured_outputs_means_the_same(llm: LLM) -> None:
    old = GuidedDecodingParams(choice=["ebb", "flow"], backend="xgrammar")
    assert generate(llm, "The tide", SamplingParams(guided_decoding=old))[0].outputs[0].text in ("ebb", "flow")


def test_a_grammar_that_cannot_be_compiled_is_named(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="["))
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.regex"):
        generate(llm, "x", params)


def test_an_answer_that_cannot_go_on_says_so_and_leaves_the_others(llm: LLM) -> None:
    impossible = SamplingParams(allowed_token_ids=[5], bad_words=[llm.get_tokenizer().decode([5])])
    failed, fine = generate(llm, ["x", "x"], [impossible, SamplingParams()])
    assert failed.outputs[0].finish_reason == "error"
    assert "no token that can come next" in (failed.outputs[0].error or "")
    assert fine.outputs[0].error is None


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"max_model_length": 5}, TypeError, "did you mean max_model_len"),
        ({"tensor_parallelism": 2}, TypeError, "tensor_parallelism"),
        ({"max_num_seqs": 0}, OptionError, "at least 1"),
        ({"max_model_len": "much"}, OptionError, "max_model_len"),
        ({"runner": "draft"}, OptionError, "speculative_config names a draft model"),
        ({"runner": "pooling"}, OptionError, "needs a model"),
        ({"enforce_eager": "false"}, OptionError, "enforce_eager must be True or False"),
        ({"lora_modules": [5]}, OptionError, "lora_modules: must be NAME=PATH"),
        ({"lora_modules": "poems"}, OptionError, "lora_modules: must be NAME=PATH"),
        ({"model": "/no/such/folder"}, TidewheelError, "/no/such/folder"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used(options: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        LLM(**options)


def test_what_was_shut_down_is_freed_and_says_so() -> None:
    gc.collect()
    before = set(threading.enumerate())
    with LLM(kv_cache_space=0.05) as llm:
        generate(llm, "x")
        assert set(threading.enumerate()) > before
    assert not [thread for thread in set(threading.enumerate()) - before if "tidewheel" in thread.name]
    with pytest.raises(TidewheelError, match="shut down"):
        generate(llm, "x")
    llm.shutdown()


def test_threads_may_share_it(llm: LLM) -> None:
    found: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        found[seed] = generate(llm, PROMPTS[0], SamplingParams(seed=seed))[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    params = [SamplingParams(seed=seed) for seed in range(6)]
    assert [found[i] for i in range(6)] == [
        output.outputs[0].token_ids for output in generate(llm, [PROMPTS[0]] * 6, params)
    ]


LEFT_RUNNING = """
import threading, time
from tidewheel import LLM, SamplingParams, TidewheelError
llm = LLM(kv_cache_space=0.1)
def run():
    try:
        llm.generate(["x"] * 2000, SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
    except TidewheelError:
        pass
threading.Thread(target=run, daemon=True).start()
time.sleep(0.5)
print("left")
"""
INTERRUPTED = """
import os, signal, threading
from tidewheel import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
with LLM(kv_cache_space=0.1) as llm:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        llm.generate(["x"] * 5000, SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
    except KeyboardInterrupt:
        print(len(llm.generate("x", use_tqdm=False)))
"""
ASYNC_LEFT_RUNNING = """
import asyncio
from tidewheel import AsyncLLM, SamplingParams
llm = AsyncLLM(kv_cache_space=0.1)
async def read(outputs):
    async for output in outputs:
        pass
async def main():
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    for _ in range(8):
        asyncio.ensure_future(read(llm.generate("x", params)))
    await asyncio.sleep(0.5)
    print("left")
asyncio.run(main())
"""
LAZY = """
import sys, tidewheel
import tidewheel.entrypoints.openai.api_server
print("tidewheel.offline" in sys.modules, "numpy" in sys.modules, "LLM" in dir(tidewheel))
"""


# Each is a process that loads the model and computes for half a second.
@pytest.mark.parametrize(
    ("script", "shown"),
    [(LEFT_RUNNING, "left"), swept(ASYNC_LEFT_RUNNING, "left"), swept(INTERRUPTED, "1"), (LAZY, "False False True")],
)
def test_programs(tmp_path: Path, script: str, shown: str) -> None:
    """One that ends without a shutdown while answers run, one that is interrupted, one that only imports."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, shown, "")
