"""The engine: inputs, batches, streams, ends and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from srt import Engine, SamplingParams
from srt.entrypoints.outputs import GenerateOutput
from srt.errors import CheckpointError, OptionError, RequestError
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import make_tensors, quantize, reference_model, write_checkpoint
from srt.test.tiny_text_model import FP8, TEXT_CONFIG, write_text_model
from srt.test.tiny_tokenizer import EOS, VOCAB_SIZE, write_tokenizer

register_cpu_ci(est_time=25, suite="per-commit")

CONFIG = TEXT_CONFIG | {"max_position_embeddings": 128}
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPTS = ["The capital of France", "x", "naïve 日本語 " * 3, "a b c d e"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    return write_text_model(directory, CONFIG)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, max_total_tokens=512, max_running_requests=8, progress=False) as engine:
        yield engine


def test_a_prompt_gives_one_result(engine: Engine) -> None:
    output = engine.generate("hello", GREEDY)
    assert isinstance(output, GenerateOutput)
    assert output.finish_reason == "length"
    assert output.matched_stop is None
    assert output.completion_tokens == len(output.token_ids) == 12
    assert output.prompt_tokens == 5
    assert engine.tokenizer is not None
    text = engine.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert output.text == text
    assert output.prefill_tokens_per_second is not None
    assert output.prefill_tokens_per_second > 0
    assert output.decode_tokens_per_second is not None
    assert output.to_dict()["decode_tokens_per_second"] == output.decode_tokens_per_second


def test_greedy_tokens_are_those_of_the_reference(engine: Engine, path: Path) -> None:
    reference = reference_model(path)
    ids = [5, 9, 100, 42]
    output = engine.generate(input_ids=ids, sampling_params=GREEDY)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + list(output.token_ids)])).logits[0]
    assert output.token_ids
    for i, token in enumerate(output.token_ids):
        row = logits[len(ids) - 1 + i]
        # Rounding may turn a near tie.
        assert row.max() - row[token] < 0.01


def test_a_batch_gives_what_its_prompts_give_alone(engine: Engine) -> None:
    together = engine.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in together] == [
        engine.generate(p, GREEDY).token_ids for p in PROMPTS
    ]


def test_seeded_sampling_does_not_depend_on_the_batch(engine: Engine) -> None:
    params = [
        SamplingParams(temperature=1, seed=i, max_new_tokens=8, ignore_eos=True) for i in range(4)
    ]
    together = [o.token_ids for o in engine.generate(PROMPTS, params)]
    alone = [engine.generate(p, q).token_ids for p, q in zip(PROMPTS, params, strict=True)]
    assert together == alone


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunked_prefill_changes_nothing(engine: Engine, path: Path, chunk: int) -> None:
    with Engine(path, max_total_tokens=512, chunked_prefill_size=chunk, progress=False) as chunked:
        outputs = chunked.generate(PROMPTS, GREEDY)
        assert [o.prompt_tokens for o in outputs] == [len(p.encode()) for p in PROMPTS]
        # Attention sums in another order; a near tie may turn, the first tokens do not.
        expected = engine.generate(PROMPTS, GREEDY)
        for output, other in zip(outputs, expected, strict=True):
            assert output.token_ids[0] == other.token_ids[0]


def test_requests_that_do_not_fit_at_once_wait(engine: Engine, path: Path) -> None:
    with Engine(path, max_total_tokens=80, max_running_requests=2, progress=False) as small:
        outputs = small.generate(PROMPTS, GREEDY)
        assert small.scheduler.kv.available_size == 80
    assert [o.token_ids for o in outputs] == [o.token_ids for o in engine.generate(PROMPTS, GREEDY)]


def test_a_stream_adds_up_to_the_results(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, GREEDY)
    texts = [""] * len(PROMPTS)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in engine.generate(PROMPTS, GREEDY, stream=True):
        texts[chunk.index] += chunk.text
        assert chunk.token_id is not None
        tokens[chunk.index].append(chunk.token_id)
        assert (chunk.output is not None) == (len(tokens[chunk.index]) == 12)
    assert texts == [output.text for output in expected]
    assert [tuple(ids) for ids in tokens] == [output.token_ids for output in expected]


def test_a_stream_that_is_left_gives_its_cache_back(engine: Engine) -> None:
    kv = engine.scheduler.kv
    chunks = engine.generate("hello", GREEDY, stream=True)
    next(chunks)
    assert kv.available_size < kv.size
    chunks.close()
    assert kv.available_size == kv.size
    chunks = engine.generate("hello", GREEDY, stream=True)
    next(chunks)
    del chunks
    assert kv.available_size == kv.size
    assert not engine.has_work


def test_a_stop_token_ends_and_is_not_text(engine: Engine) -> None:
    whole = engine.generate("hello", GREEDY)
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    params = SamplingParams(
        temperature=0, max_new_tokens=12, ignore_eos=True, stop_token_ids=(stop,)
    )
    output = engine.generate("hello", params)
    assert (output.finish_reason, output.matched_stop) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: first + 1]
    assert whole.text.startswith(output.text)


def test_a_stop_text_ends_before_it(engine: Engine) -> None:
    # The model's output is random bytes: find a prompt that two whole characters follow.
    prompts = [chr(c) * 3 for c in range(ord("a"), ord("z"))]
    prompt, whole, stop = next(
        (prompt, output, characters[1])
        for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True)
        if len(characters := output.text.replace("\ufffd", "")) > 1
    )
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True, stop=(stop,))
    output = engine.generate(prompt, params)
    assert (output.finish_reason, output.matched_stop) == ("stop", stop)
    assert output.text == whole.text.partition(stop)[0]


def test_end_of_sequence(path: Path, tmp_path: Path) -> None:
    """A head that always predicts EOS ends at once, unless it is to be ignored."""
    tensors = make_tensors(CONFIG | {"mlp_bias": False})
    tensors["model.norm.weight"] = torch.ones(96).bfloat16()
    head = torch.zeros(VOCAB_SIZE, 96)
    tensors["model.embed_tokens.weight"] = torch.ones(VOCAB_SIZE, 96).bfloat16()
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    head[EOS] = 1
    tensors["lm_head.weight"] = head.bfloat16()
    write_checkpoint(tmp_path, CONFIG, tensors)
    write_tokenizer(tmp_path)
    with Engine(tmp_path, max_total_tokens=256, progress=False) as engine:
        output = engine.generate("abc", SamplingParams(temperature=0))
        assert (output.token_ids, output.text) == ((EOS,), "")
        assert (output.finish_reason, output.matched_stop) == ("stop", EOS)
        assert output.decode_tokens_per_second is None
        assert engine.generate("abc", GREEDY).token_ids == (EOS,) * 12


def test_conversations_go_through_the_template(engine: Engine) -> None:
    message = {"role": "user", "content": "hi"}
    output = engine.generate(messages=[message], sampling_params=GREEDY)
    text = "<s>user:hi</s><s>assistant:"
    assert output.token_ids == engine.generate(text, GREEDY).token_ids
    both = engine.generate(messages=[[message], [message, message]], sampling_params=GREEDY)
    assert both[0].token_ids == output.token_ids
    assert both[1].prompt_tokens > both[0].prompt_tokens


def test_the_context_ends_a_generation(engine: Engine) -> None:
    output = engine.generate("a" * 120, SamplingParams(max_new_tokens=100, ignore_eos=True, seed=0))
    assert output.completion_tokens == 8
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of prompt, messages and input_ids, found none"),
        ({"prompt": "a", "input_ids": [1]}, "found prompt and input_ids"),
        ({"prompt": ""}, "request 0: the prompt is empty"),
        ({"input_ids": []}, "the prompt is empty"),
        (
            {"input_ids": [[1], [VOCAB_SIZE]]},
            "request 1: expected token ids from 0 to 258, found 259",
        ),
        ({"input_ids": [1, -1]}, "found -1"),
        ({"prompt": "a" * 128}, "128 tokens leaves no room.*context of 128"),
        ({"prompt": ["a", "b"], "sampling_params": [GREEDY] * 3}, "expected one or 2, found 3"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "refuses.*unknown role alien"),
    ],
)
def test_bad_requests(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(**arguments)
    assert engine.scheduler.kv.available_size == 512


def test_a_request_larger_than_the_cache(path: Path) -> None:
    with Engine(path, max_total_tokens=20, progress=False) as engine:
        with pytest.raises(
            RequestError, match="10 prompt tokens and 12 new ones need 21 slots, the cache has 20"
        ):
            engine.generate(["ok", "a" * 10], GREEDY)
        assert engine.generate("a" * 9, GREEDY).completion_tokens == 12


def test_streams_are_read_in_any_order(engine: Engine, path: Path) -> None:
    expected = [o.token_ids for o in engine.generate(["hello", "world"], GREEDY)]
    first = engine.generate("hello", GREEDY, stream=True)
    start = next(first)
    second = engine.generate("world", GREEDY, stream=True)
    assert tuple(chunk.token_id for chunk in second) == expected[1]
    assert (start.token_id, *(chunk.token_id for chunk in first)) == expected[0]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_total_tokens", 0),
        ("max_running_requests", 0),
        ("chunked_prefill_size", 0),
        ("num_threads", 0),
        ("compiled_batch_sizes", [4, 0]),
    ],
)
def test_bad_options(path: Path, option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{option}: expected an integer >= 1, found 0"):
        Engine(path, **{option: value})


def test_context_length_option(path: Path) -> None:
    with Engine(path, context_length=10, progress=False) as engine:
        assert engine.generate("abc", GREEDY).completion_tokens == 7


def test_without_a_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, make_tensors(CONFIG))
    with Engine(tmp_path, max_total_tokens=64, progress=False) as engine:
        output = engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)
        assert (output.text, output.completion_tokens) == ("", 12)
        with pytest.raises(RequestError, match="no tokenizer; give input_ids"):
            engine.generate("text")
        with pytest.raises(RequestError, match="stop texts need a tokenizer"):
            engine.generate(input_ids=[1], sampling_params=SamplingParams(stop="x"))


def test_after_shutdown(path: Path) -> None:
    engine = Engine(path, max_total_tokens=64, progress=False)
    engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("x")


def test_requests_come_and_go_while_others_run(engine: Engine) -> None:
    expected = {rid: engine.generate(text, GREEDY).token_ids for rid, text in enumerate(PROMPTS)}
    chunks = []
    engine.add_request("r0", PROMPTS[0], GREEDY)
    chunks += engine.step()
    engine.add_request("r1", PROMPTS[1], GREEDY)
    engine.add_request("gone", PROMPTS[2], GREEDY)
    stream = engine.generate(PROMPTS[3], GREEDY, stream=True)
    assert tuple(chunk.token_id for chunk in stream) == expected[3]
    engine.add_request("late", PROMPTS[2], SamplingParams(temperature=0, max_new_tokens=100))
    chunks += engine.step()
    engine.abort("late")
    while engine.has_work:
        chunks += engine.step()
    tokens = {rid: [c.token_id for c in chunks if c.rid == rid] for rid in ("r0", "r1", "gone")}
    assert tuple(tokens["r0"]) == expected[0]
    assert tuple(tokens["r1"]) == expected[1]
    assert tuple(tokens["gone"]) == expected[2]
    last = [c for c in chunks if c.rid == "late"][-1]
    assert last.output is not None
    assert (last.token_id, last.output.finish_reason) == (None, "abort")
    with pytest.raises(RequestError, match="request twice: expected a single input"):
        engine.add_request("twice", ["a", "b"], GREEDY)  # type: ignore[arg-type]


def test_a_shared_prefix_changes_no_bit(path: Path) -> None:
    """64 requests of mixed length, 60 % of which begin alike, batched and alone."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 40, (64,), generator=generator).tolist()
    ids = torch.randint(3, VOCAB_SIZE, (64, 40), generator=generator).tolist()
    prefix = torch.randint(3, VOCAB_SIZE, (60,), generator=generator).tolist()
    prompts = [(prefix if i % 5 < 3 else []) + ids[i][:n] for i, n in enumerate(lengths)]
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {"max_running_requests": 64, "progress": False}
    with Engine(path, max_total_tokens=2000, chunked_prefill_size=100, **options) as engine:
        together = engine.generate(input_ids=prompts, sampling_params=params)
    with Engine(path, max_total_tokens=128, enable_radix_cache=False, **options) as engine:
        alone = [engine.generate(input_ids=ids, sampling_params=params) for ids in prompts]
    # In a cache that holds only a few of them, requests are retracted and computed again.
    with Engine(path, max_total_tokens=300, chunked_prefill_size=50, **options) as engine:
        tight = engine.generate(input_ids=prompts, sampling_params=params)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.token_ids for o in tight] == [o.token_ids for o in alone]
    assert sum(o.cached_tokens for o in together) >= 38 * len(prefix)


def test_log_probabilities_agree_with_the_reference(engine: Engine, path: Path) -> None:
    ids = [5, 9, 100, 42, 7]
    params = SamplingParams(
        temperature=0,
        max_new_tokens=4,
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=3,
        return_prompt_logprob=True,
    )
    output = engine.generate(input_ids=ids, sampling_params=params)
    with torch.inference_mode():
        logits = reference_model(path)(torch.tensor([[*ids, *output.token_ids]])).logits[0]
    expected = logits.log_softmax(-1)
    assert output.prompt_logprobs is not None and output.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    entries += output.logprobs
    assert [entry.token_id for entry in entries] == [*ids[1:], *output.token_ids]
    for row, entry in zip(expected, entries, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=0.01)
        assert [p for _, p in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_output_projection(tmp_path: Path, tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    write_checkpoint(tmp_path, config, quantize(make_tensors(config)), FP8)
    ids = [5, 9, 100, 42, 7]
    params = SamplingParams(
        temperature=0, max_new_tokens=1, return_logprob=True, top_logprobs_num=5
    )
    entries = []
    for quantized in (False, True):
        with Engine(
            tmp_path, max_total_tokens=64, quantize_lm_head=quantized, progress=False
        ) as engine:
            output = engine.generate(input_ids=ids, sampling_params=params)
            assert output.logprobs is not None
            entries.append(output.logprobs[0])
            model = engine.model_runner.model
            weight = (model.lm_head or model.model.embed_tokens).weight
            assert (weight.dtype == torch.float8_e4m3fn) == quantized
    plain, fp8 = (dict(entry.top) for entry in entries)
    assert plain != fp8
    # e4m3 keeps four bits: logits move by some percent of their spread, which is about 1 here.
    for token in plain.keys() & fp8.keys():
        assert abs(plain[token] - fp8[token]) < 0.2


@pytest.mark.parametrize("scale", [None, 0.02, -1.0])
def test_a_cache_in_fp8(tmp_path: Path, scale: float | None) -> None:
    tensors = quantize(make_tensors(CONFIG))
    for layer in range(2 if scale is not None else 0):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    write_checkpoint(tmp_path, CONFIG, tensors, FP8)
    options: dict[str, Any] = {"max_total_tokens": 64, "progress": False}
    if scale == -1.0:
        with pytest.raises(CheckpointError, match=r"scale of the KV cache.*positive.*found: -1.0"):
            Engine(tmp_path, kv_cache_dtype="fp8_e4m3", **options)
        return
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, return_logprob=True)
    ids = list(range(20, 50))
    logprobs = []
    for dtype in ("auto", "fp8_e4m3"):
        with Engine(tmp_path, kv_cache_dtype=dtype, **options) as engine:
            output = engine.generate(input_ids=ids, sampling_params=params)
            assert output.logprobs is not None
            logprobs.append([entry.logprob for entry in output.logprobs])
            keys, _ = engine.model_runner.kv_pool.get_kv_buffer(1)
            assert keys.dtype == (torch.float16 if dtype == "auto" else torch.float8_e4m3fn)
    assert logprobs[0] != logprobs[1]
    assert logprobs[0][0] == pytest.approx(logprobs[1][0], abs=0.1)


def test_an_unknown_cache_dtype(path: Path) -> None:
    with pytest.raises(OptionError, match="kv_cache_dtype: expected one of auto, fp8_e4m3"):
        Engine(path, kv_cache_dtype="int8", progress=False)
