import subprocess
import sys
from pathlib import Path

import pytest

from video_client import pair
from video_client.pair import Pair, PairSettings, ServiceEnded, free_ports


def settings(folder: Path, model: str = "tiny", **changes: str) -> PairSettings:
    encoder, diffusion = free_ports(2)
    return PairSettings(model, "tiny", encoder, diffusion, folder / "state", log_dir=folder / "logs", **changes)


def test_every_choice_reaches_the_command_lines(tmp_path: Path) -> None:
    chosen = settings(tmp_path, overrides='{"1":{}}', lora="/lora", task="fl2va")
    encoder, diffusion = chosen.command("encoder_service"), chosen.command("diffusion_service")
    for command in (encoder, diffusion):
        assert command[3:7] == ["--model", "tiny", "--deploy-config", "tiny"]
        assert command[command.index("--stage-overrides") + 1] == '{"1":{}}'
    assert encoder[encoder.index("--port") + 1] == str(chosen.encoder_port)
    assert diffusion[diffusion.index("--encoder-url") + 1] == chosen.encoder_url
    assert diffusion[diffusion.index("--lora-path") + 1] == "/lora"
    assert diffusion[diffusion.index("--task-type") + 1] == "fl2va"
    assert "--lora-path" not in encoder


@pytest.mark.parametrize(("first", "last"), [(32_768, 32_767), (1_024, 65_535)])
def test_free_ports_differ_and_no_connection_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    monkeypatch.setattr(pair, "HANDED_OUT", tmp_path / "range")
    pair.HANDED_OUT.write_text(f"{first}\t60999\n")
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) <= last


def test_a_service_that_ends_at_start_is_named_and_its_log_shown(tmp_path: Path) -> None:
    with Pair(settings(tmp_path, model="/no/such/folder")) as both:
        with pytest.raises(ServiceEnded, match=r"_service ended with exit code 2"):
            both.wait_ready(60)
        assert "/no/such/folder" in both.tails()


def test_one_that_cannot_be_started_leaves_none_running(tmp_path: Path) -> None:
    (tmp_path / "logs" / "diffusion_service.log").mkdir(parents=True)
    both = Pair(settings(tmp_path))
    with pytest.raises(IsADirectoryError), both:
        pass
    assert not Path(f"/proc/{both.pid('encoder_service')}").exists()


def test_serve_stops_the_other_service_when_one_ends(tmp_path: Path) -> None:
    ports = [str(port) for port in free_ports(2)]
    command = [sys.executable, "-m", "video_client.pair", "--model", "/no/such/folder", "--encoder-port", ports[0]]
    run = subprocess.run(
        [*command, "--port", ports[1], "--state-dir", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert "/no/such/folder" in run.stderr
    assert "stopping the other" in run.stderr
