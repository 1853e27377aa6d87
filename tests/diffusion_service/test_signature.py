"""Signatures that receivers of Standard Webhooks accept; the OpenAI SDK's own check is the judge."""

import base64
import time
from pathlib import Path

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from diffusion_service.signature import Signer
from shared_schema.errors import DeployError


def secret_of(length: int, byte: int = 1) -> str:
    return f"whsec_{base64.b64encode(bytes([byte]) * length).decode()}"


OLD, NEW = secret_of(24), secret_of(24, byte=2)
BODY = '{"type":"video.completed","data":{"prompt":"é"}}'.encode()


def check(headers: dict[str, str], secret: str, body: bytes = BODY) -> None:
    OpenAI(api_key="any").webhooks.verify_signature(body, headers, secret=secret)


def secret_file(folder: Path, text: str) -> Path:
    path = folder / "secret"
    path.write_text(text)
    return path


def test_the_example_of_the_standard_comes_out() -> None:
    signer = Signer((base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),))
    headers = signer.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.7, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"


def test_both_secrets_verify_while_receivers_change_over(tmp_path: Path) -> None:
    headers = Signer.read(secret_file(tmp_path, f"{NEW}\n{OLD}\n")).headers("msg_1", time.time(), BODY)
    check(headers, OLD)
    check(headers, NEW)


def test_another_body_or_secret_does_not_verify(tmp_path: Path) -> None:
    headers = Signer.read(secret_file(tmp_path, NEW)).headers("msg_1", time.time(), BODY)
    check(headers, NEW)
    with pytest.raises(InvalidWebhookSignatureError):
        check(headers, OLD)
    with pytest.raises(InvalidWebhookSignatureError):
        check(headers, NEW, BODY + b" ")


@pytest.mark.parametrize("length", [24, 64])
def test_a_secret_has_24_to_64_bytes(tmp_path: Path, length: int) -> None:
    assert Signer.read(secret_file(tmp_path, secret_of(length))).secrets == (b"\1" * length,)


@pytest.mark.parametrize(
    "text", ["", "plain", "whsec_!!", "whsec_é", f"{OLD}!", OLD.removeprefix("whsec_"), secret_of(23), secret_of(65)]
)
def test_a_secret_file_that_holds_none_is_refused_at_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(DeployError, match=r"service\.webhook\.secret_file"):
        Signer.read(secret_file(tmp_path, text))


def test_a_secret_is_in_no_text(tmp_path: Path) -> None:
    signer = Signer.read(secret_file(tmp_path, NEW))
    assert "secrets" not in repr(signer)
    with pytest.raises(DeployError, match="cannot be read"):
        Signer.read(tmp_path / "missing")
