"""What works for etcdctl works here: flags, environment, and what is refused."""

from pathlib import Path

import pytest

from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.access import EtcdConfig


@pytest.mark.parametrize(
    ("text", "endpoints", "tls"),
    [
        ("host:2379", ("host:2379",), False),
        ("host", ("host:2379",), False),
        ("a.b.", ("a.b.:2379",), False),
        ("a:2379,b:2380", ("a:2379", "b:2380"), False),
        (" a:1 , b:2 ", ("a:1", "b:2"), False),
        ("a:1,a:1", ("a:1",), False),
        ("http://h:1", ("h:1",), False),
        ("http://h:1/", ("h:1",), False),
        ("https://h:1,https://i:2", ("h:1", "i:2"), True),
        ("[::1]:2379", ("[::1]:2379",), False),
        ("https://[fe80::1]", ("[fe80::1]:2379",), True),
        ("unix:///run/a b/etcd:0", ("unix:///run/a b/etcd:0",), False),
    ],
)
def test_endpoints(text: str, endpoints: tuple[str, ...], *, tls: bool) -> None:
    config = EtcdConfig.parse(text, env={})
    assert config is not None
    assert (config.endpoints, config.tls) == (endpoints, tls)


@pytest.mark.parametrize(
    "text",
    [":2379", "h:", "h:0", "h:99999", "h:x", "::1:2379", "ftp://h:1", "h:1,", "u@h:1", "h:1/path",
     "unix://etcd:0", "http://a:1,https://b:2"],
)  # fmt: skip
def test_an_endpoint_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="endpoint"):
        EtcdConfig.parse(text, env={})


def test_no_endpoint_anywhere() -> None:
    assert EtcdConfig.parse(None, env={"ETCDCTL_USER": "a:b"}) is None
    assert EtcdConfig.parse("", env={"ETCDCTL_ENDPOINTS": " "}) is None


def test_the_environment_of_etcdctl() -> None:
    environment = {
        "ETCDCTL_ENDPOINTS": "https://a:1",
        "ETCDCTL_CACERT": "ca",
        "ETCDCTL_CERT": "cert",
        "ETCDCTL_KEY": "key",
        "ETCDCTL_USER": "me:se:cret",
    }
    config = EtcdConfig.parse(None, env=environment)
    assert config == EtcdConfig(("a:1",), True, "ca", "cert", "key", "me", "se:cret")
    assert "cret" not in repr(config)


def test_flags_come_first() -> None:
    environment = {"ETCDCTL_ENDPOINTS": "a:1", "ETCDCTL_USER": "me:1", "ETCDCTL_PASSWORD": "2"}
    config = EtcdConfig.parse("b:2", user="you", env=environment)
    assert config == EtcdConfig(("b:2",), user="you", password="2")
    config = EtcdConfig.parse("b:2", user="you", env=environment | {"ELASTIC_ETCD_PASSWORD": "3"})
    assert config == EtcdConfig(("b:2",), user="you", password="3")


def test_certificates_mean_tls() -> None:
    config = EtcdConfig.parse("a:1", cacert="ca", env={})
    assert config is not None
    assert config.tls
    with pytest.raises(UsageError, match="https"):
        EtcdConfig.parse("http://a:1", cacert="ca", env={})
    with pytest.raises(UsageError, match="both --cert and --key"):
        EtcdConfig.parse("a:1", cert="c", env={})


def test_password_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    config = EtcdConfig.parse("a", user="me", password_file=str(file), env={})
    assert config is not None
    assert config.password == "secret"
    file.write_text("\n")
    with pytest.raises(UsageError, match="first line is empty"):
        EtcdConfig.parse("a", user="me", password_file=str(file), env={})
    with pytest.raises(UsageError, match="No such file"):
        EtcdConfig.parse("a", user="me", password_file=str(tmp_path / "none"), env={})


def test_a_password_is_not_for_the_command_line() -> None:
    with pytest.raises(UsageError, match="ELASTIC_ETCD_PASSWORD"):
        EtcdConfig.parse("a", user="me:secret", env={})
    with pytest.raises(UsageError, match="no password for etcd user 'me'"):
        EtcdConfig.parse("a", user="me", env={"ETCDCTL_USER": "you:secret"})
