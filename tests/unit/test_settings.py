"""settings.py: what is captured, from the environment."""

import dataclasses

import pytest

from otel_rollout.settings import Settings

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def read(**environ):
    return dataclasses.asdict(Settings.from_environment(environ))


def test_the_defaults_capture_content_and_ids_but_no_pixels(caplog):
    assert read() == dataclasses.asdict(Settings()) == {"content": True, "tokens": "ids", "images": False}
    assert not caplog.records


@pytest.mark.parametrize("value", ["NO_CONTENT", "no_content", " EVENT_ONLY ", "false"])
def test_content_off_keeps_counts_of_tokens_only(value):
    assert read(**{CONTENT: value}) == {"content": False, "tokens": "counts", "images": False}


@pytest.mark.parametrize("value", ["SPAN_ONLY", "SPAN_AND_EVENT", "true", ""])
def test_content_on(value, caplog):
    assert read(**{CONTENT: value})["content"] is True
    assert not caplog.records


@pytest.mark.parametrize("mode", ["none", "counts", "ids", "full", "FULL"])
def test_token_modes(mode):
    assert read(OTEL_ROLLOUT_TOKENS=mode)["tokens"] == mode.lower()


def test_a_token_mode_that_is_asked_for_outlives_no_content():
    assert read(**{CONTENT: "NO_CONTENT", "OTEL_ROLLOUT_TOKENS": "ids"})["tokens"] == "ids"


@pytest.mark.parametrize(("value", "images"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_images(value, images):
    assert read(OTEL_ROLLOUT_IMAGES=value)["images"] is images


def test_what_is_not_understood_is_said_once_for_each_variable(caplog):
    for _ in range(2):
        assert read(**{CONTENT: "7", "OTEL_ROLLOUT_TOKENS": "7"}) == {"content": True, "tokens": "ids", "images": False}
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2
    assert said[0].startswith(f"{CONTENT}=7 ")
    assert "NO_CONTENT" in said[0]
    assert said[1].startswith("OTEL_ROLLOUT_TOKENS=7 ")
    assert "none|counts|ids|full" in said[1]


def test_settings_are_frozen_and_slotted():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().tokens = "full"
    assert not hasattr(Settings(), "__dict__")
