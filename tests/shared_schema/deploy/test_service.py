"""The `service:` block as people write it."""

from pathlib import Path

import pytest

from shared_schema.deploy.load import load_deployment
from shared_schema.deploy.service import AllowedHost, ServiceSettings
from shared_schema.errors import DeployError


def service(tmp_path: Path, text: str) -> ServiceSettings:
    """The block of a file that says `text` in it."""
    file = tmp_path / "deploy.yaml"
    file.write_text(f"base_config: tiny\nservice:\n  {text}\n")
    return load_deployment(str(file)).service


def test_limits_that_nobody_sets() -> None:
    settings, caps = ServiceSettings(), ServiceSettings().media_caps
    assert (caps.image_bytes, caps.video_bytes, caps.audio_bytes) == (30 * 2**20, 50 * 2**20, 15 * 2**20)
    assert (caps.image_pixels, caps.max_side) == (50_000_000, 5760)
    assert (settings.retention_hours, settings.sync_timeout_s) == (168, 600)
    assert (settings.stuck_s, settings.dead_s) == (60, 10)


def test_hosts_are_names_or_names_with_a_flag(tmp_path: Path) -> None:
    given = service(tmp_path, 'media_hosts: [cdn.test, "*.media.test", {host: 127.0.0.1, private: true}, "::1"]')
    assert given.media_hosts == (
        AllowedHost(host="cdn.test"),
        AllowedHost(host="*.media.test"),
        AllowedHost(host="127.0.0.1", private=True),
        AllowedHost(host="::1"),
    )


@pytest.mark.parametrize("host", ['"*"', "http://a.test", "a.test:80", "A.test", "{host: '*.a.test', private: true}"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(DeployError, match="media_hosts"):
        service(tmp_path, f"media_hosts: [{host}]")


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("a.test", "a.test", True),
        ("a.test", "b.a.test", False),
        ("*.a.test", "b.a.test", True),
        ("*.a.test", "a.test", False),
        ("*.a.test", "ba.test", False),
    ],
)
def test_a_star_stands_for_every_name_under_it(pattern: str, name: str, covered: bool) -> None:
    assert AllowedHost(host=pattern).covers(name) is covered


def test_webhooks_are_off_until_a_file_names_hosts_and_a_secret(tmp_path: Path) -> None:
    assert service(tmp_path, "queue_limit: 1").webhook.hosts == ()
    given = service(tmp_path, "webhook: {hosts: [hooks.test], secret_file: /run/secrets/hook}").webhook
    assert (given.hosts, given.secret_file) == ((AllowedHost(host="hooks.test"),), Path("/run/secrets/hook"))
    with pytest.raises(DeployError, match="hosts needs secret_file"):
        service(tmp_path, "webhook: {hosts: [hooks.test]}")


@pytest.mark.parametrize(
    "text",
    [
        "cors_origins: [studio.example.com]",
        "cors_origins: ['https://studio.example.com/']",
        "root_path: h3",
        "root_path: /h3/",
        "root_path: /",
        "jobs_per_key: 0",
        "requests_per_minute: 0",
        "min_free_bytes: -1",
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DeployError, match=text.partition(":")[0]):
        service(tmp_path, text)


def test_who_may_call_is_read_as_it_is_written(tmp_path: Path) -> None:
    text = "cors_origins: ['https://a.test:8443', '*']\n  root_path: /a/b\n  trusted_proxies: [10.0.0.0/8]"
    given = service(tmp_path, text)
    assert (given.cors_origins, given.root_path) == (("https://a.test:8443", "*"), "/a/b")
    assert given.trusted_proxies == ("10.0.0.0/8",)
