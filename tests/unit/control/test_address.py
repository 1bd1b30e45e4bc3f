# SPDX-License-Identifier: Apache-2.0
"""Addresses of processes: forms, and which way they say."""

from __future__ import annotations

import pytest

from triton_omni.backends.control.address import Address, address_towards, host_and_port, host_token, parse_address


@pytest.mark.parametrize(
    "text", ["/run/x.sock", "tcp://host:1", "tcp://[::1]:7400", "t:/run/x.sock|tcp://10.0.0.1:7400", "t:/x|tcp://[fe80::1]:1"]
)  # fmt: skip
def test_an_address_reads_as_it_was_written(text):
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "x.sock", "tcp://", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://host:x", "tcp://:1",
     "tcp://::1:7400", "tcp://[host]:1", "udp://host:1", "/x|tcp://host:1", "t:x|tcp://host:1", "t:/x|", "t:/x|http://h:1",
     "tcp://host:²"],
)  # fmt: skip
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="address must be"):
        parse_address(text)


def test_only_a_process_of_this_host_uses_the_path():
    assert parse_address("/run/x.sock").is_local
    assert Address("/run/x.sock", "tcp://h:1", host_token()).is_local
    assert not Address("/run/x.sock", "tcp://h:1", "another").is_local
    assert not parse_address("tcp://127.0.0.1:1").is_local


def test_the_way_to_a_host_names_our_own_address():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert host_and_port("tcp://[::1]:7") == ("::1", 7)
