"""A model directory for verl without a hub: a made-up tokenizer of Qwen's size and a Qwen2 configuration."""

import functools
from itertools import chain, product
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Not special, or decoding would drop them and verl's hermes parser would find no call.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QWEN_VOCABULARY = 151_643

# ChatML with tools in the Hermes style, as Qwen2.5 has it.
CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{{- '<|im_start|>system\n' + (first.content if first else 'You are a helpful assistant.') -}}
{%- if tools -%}
{{- '\n\n# Tools\n\nYou may call functions. Their signatures stand within <tools></tools>:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools>\n\nFor each call return a JSON object within <tool_call></tool_call>:\n' -}}
{{- '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{- '<|im_start|>assistant' + ('\n' + message.content if message.content else '') -}}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function is defined else call -%}
{{- '\n<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
{{- (function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def build_tokenizer(vocabulary: int = QWEN_VOCABULARY):
    """A byte-level BPE whose merges are all strings of two and three letters and as many of four as fit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    pairs = ((a, b) for a, b in product(LETTERS, repeat=2))
    triples = ((a + b, c) for a, b, c in product(LETTERS, repeat=3))
    quads = ((a + b, c + d) for a, b, c, d in product(LETTERS, repeat=4))
    for left, right in chain(pairs, triples, quads):
        if len(vocab) >= vocabulary:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    model = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    model.add_tokens([AddedToken(token, special=False) for token in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=131_072
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_dir(path: str | Path, *, vocabulary: int = QWEN_VOCABULARY) -> str:
    """Write tokenizer and configuration into `path` (a second or two; again: nothing) and return it."""
    path = Path(path)
    if not (path / "config.json").exists():
        from transformers import Qwen2Config

        path.mkdir(parents=True, exist_ok=True)
        tokenizer = build_tokenizer(vocabulary)
        tokenizer.save_pretrained(path)
        # verl picks the way it joins turns by model_type.
        Qwen2Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=131_072,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(path)
    return str(path)


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str):
    """The tokenizer of a model directory; one object a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
