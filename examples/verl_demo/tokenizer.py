"""A small byte-level BPE tokenizer with a Qwen2.5-style chat template, trained at start on the demo's own texts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl_demo.questions import INSTRUCTION, load_questions
from verl_demo.script import plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Not special: decoding skips special tokens, and the tool parser looks for these in the decoded text.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = r"""
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
{{- '\n\n# Tools\n\nThese functions can be called:\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\n\nTo call one, write a JSON object inside <tool_call></tool_call>:\n<tool_call>\n' }}
{{- '{"name": <function name>, "arguments": <object with its arguments>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (message.content or '') }}
{%- for item in message.tool_calls or [] %}
{%- set called = item.function if item.function is defined else item %}
{{- '\n<tool_call>\n{"name": "' + called.name + '", "arguments": ' + (called.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def texts() -> Iterator[str]:
    """What the demo says: instruction, template, questions and every turn of the script."""
    yield INSTRUCTION
    yield CHAT_TEMPLATE
    for question in load_questions():
        yield json.dumps(question.messages())
        for sample in range(8):
            yield from (turn[:600] for turn in plan(question, sample, 0).turns)


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Any text survives encode and decode; the demo's own words become one or two tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=4096, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model_dir(path: Path, *, weights: bool) -> None:
    """A model directory as verl expects one: tokenizer, Qwen2 configuration, and random weights if asked for."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(path)
    if weights:
        import torch

        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
