"""One line a record, with level and process, and no noise from libraries."""

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from shared_runtime.logs import OWN, SILENT, set_up_logging
from shared_runtime.tracing import Errand, working_for


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in (*OWN, *SILENT):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_line_has_time_level_process_logger_and_message() -> None:
    stream = io.StringIO()
    set_up_logging("info", "encoder-tp1", stream=stream)
    logging.getLogger("encoder_service.worker").info("loaded %d layers", 50)
    (line,) = lines(stream)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO encoder-tp1 encoder_service\.worker: loaded 50 layers", line
    )


def test_a_traceback_or_a_line_break_in_a_message_stays_on_one_line() -> None:
    stream = io.StringIO()
    set_up_logging("info", "diffusion-api", stream=stream)
    logger = logging.getLogger("diffusion_service.api")
    logger.warning("a\r\nb")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    first, second = lines(stream)
    assert first.endswith(r"WARNING diffusion-api diffusion_service.api: a\r\nb")
    assert second.endswith(r"\nValueError: broken")


def test_our_packages_log_at_the_level_asked_for_and_libraries_only_warnings() -> None:
    stream = io.StringIO()
    set_up_logging("debug", "p", stream=stream)
    logging.getLogger("shared_runtime.media").debug("ours")
    logging.getLogger("httpx").info("noise")
    logging.getLogger("uvicorn.access").warning("noise")
    logging.getLogger("httpx").warning("theirs")
    assert [line.rpartition(": ")[2] for line in lines(stream)] == ["ours", "theirs"]
    set_up_logging("error", "p", stream=stream)
    logging.getLogger("shared_runtime.media").warning("quiet")
    assert len(lines(stream)) == 2


def test_setting_up_again_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logging("info", "p", stream=first)
    set_up_logging("info", "p", stream=second)
    logging.getLogger("shared_schema").info("once")
    assert (lines(first), len(lines(second))) == ([], 1)


def test_warnings_of_python_become_records() -> None:
    stream = io.StringIO()
    set_up_logging("info", "p", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    assert len(lines(stream)) == 1
    assert "WARNING p py.warnings: " in lines(stream)[0]


def test_a_line_says_which_request_it_is_about() -> None:
    stream = io.StringIO()
    set_up_logging("info", "p", stream=stream)
    with working_for(Errand("r-1")):
        logging.getLogger("shared_runtime.x").info("at work")
    logging.getLogger("shared_runtime.x").info("idle")
    first, second = lines(stream)
    assert first.endswith("shared_runtime.x: [r-1] at work")
    assert second.endswith("shared_runtime.x: idle")


def test_machines_get_an_object_a_line() -> None:
    stream = io.StringIO()
    set_up_logging("info", "encoder-tp0", "json", stream)
    logger = logging.getLogger("encoder_service.worker")
    with working_for(Errand("r-2")):
        try:
            raise ValueError("broken\nin two")
        except ValueError:
            logger.exception("it %s", "failed")
    logger.info("idle")
    first, second = (json.loads(line) for line in lines(stream))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first.pop("error").endswith("ValueError: broken\nin two")
    assert first == {
        "level": "error",
        "process": "encoder-tp0",
        "logger": "encoder_service.worker",
        "request_id": "r-2",
        "message": "it failed",
    }
    assert (second["request_id"], second["message"], "error" in second) == (None, "idle", False)
