# SPDX-License-Identifier: Apache-2.0
"""The `links` parameter of a model: what is wrong with a key, an address or TLS's files is said at the start."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests.kit.tcp_ends import certificates
from triton_omni.backends.config.schema import ConfigError
from triton_omni.backends.control.link_settings import KEY_VARIABLE, LinkSettings, take_key
from triton_omni.backends.stub import links as links_module
from triton_omni.backends.stub.external_worker import external_command
from triton_omni.backends.stub.links import link_settings, placer_command


def settings(tmp_path, key=b"k" * 32, mode=0o600, **values):
    file = tmp_path / "key"
    file.write_bytes(key)
    file.chmod(mode)
    return link_settings(json.dumps({"key_file": str(file), "host": "10.0.0.5"} | values), "model x")


def test_settings_reach_every_process(tmp_path):
    tls = certificates()
    got = settings(tmp_path, ports="7400-7410", tls=dict(zip(("cert", "key", "ca"), map(str, tls), strict=True)))
    assert got == LinkSettings("10.0.0.5", b"k" * 32, (7400, 7410), tuple(map(str, tls)), str(tmp_path / "key"))
    assert got.arguments() == ["--host", "10.0.0.5", "--ports", "7400-7410", "--tls", *map(str, tls)]
    environment = got.environment()
    assert take_key(environment) == b"k" * 32
    assert KEY_VARIABLE not in environment, "no child of the worker inherits it"
    assert link_settings("", "model x") is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"key": b"short"}, "must hold 32 to 4096 random bytes .got 5."),
        ({"key": b"k" * 5000}, "must hold 32 to 4096 random bytes .got 5000."),
        ({"mode": 0o640}, "must be readable by its owner only .mode 640.: chmod 600"),
        ({"key_file": "/nowhere/key"}, "model x: links.key_file: /nowhere/key: No such file.*head -c 32 /dev/urandom"),
        ({"tls": {"cert": "/no", "key": "/no", "ca": "/no"}}, "model x: links.tls: /no, /no, /no cannot be used"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, **values)


def test_a_host_without_a_way_out_must_be_named(tmp_path, monkeypatch):
    def no_way(host):
        raise OSError("no way")

    monkeypatch.setattr(links_module, "address_towards", no_way)
    with pytest.raises(ConfigError, match=r"links\.host: this host has no default route; name its address"):
        settings(tmp_path, host="auto")


def test_the_workers_command_never_holds_the_key():
    links = LinkSettings("10.0.0.5", b"k" * 32, key_file="/etc/a key", tls=("c", "k", "a"))
    command = external_command("tcp://10.0.0.5:1", links, ["--options", '{"model": "it\'s $HOME"}'], {"A": "b c"})
    assert (b"k" * 32).hex() not in command and "kkkk" not in command
    words = shlex.split(command)
    assert words[:4] == ["env", "TRITON_OMNI_LINK_KEY_FILE=/etc/a key", "A=b c", "python"]
    assert words[-4:] == ["--tls", "c", "k", "a"] and '{"model": "it\'s $HOME"}' in words


def test_the_placers_interpreter_must_be_there():
    assert placer_command(json.dumps({"address": "h:1", "python": sys.executable}), "model x")[0] == sys.executable
    with pytest.raises(ConfigError, match=r"model x: cluster\.python: /no/python is no interpreter"):
        placer_command(json.dumps({"address": "h:1", "python": "/no/python"}), "model x")
    with pytest.raises(ConfigError, match=r"model x: cluster: .*missing required field `address`"):
        placer_command("", "model x")
