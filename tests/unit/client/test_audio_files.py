# SPDX-License-Identifier: Apache-2.0
"""Audio files as recorders, browsers and converters write them, made here: each gives the tone it was made of."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable, Sequence

import av
import numpy as np
import pytest

from triton_omni.media import Media, MediaError, limits
from triton_omni.media.audio import decode_audio
from triton_omni.media.limits import SPEECH_HZ

TONE_HZ = 440.0
UNKNOWN = 0xFFFFFFFF
PCM, FLOAT, MULAW = 1, 3, 7
SIZES = [0, 0x7FFFFFFF, UNKNOWN]
"""What a recorder that cannot seek back leaves in a header."""


def tone(seconds: float = 1.0, rate_hz: int = SPEECH_HZ) -> np.ndarray:
    """(samples,) float64"""
    return 0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(round(seconds * rate_hz)) / rate_hz)


def loudness(audio: np.ndarray) -> float:
    """Root mean square of the middle, where no filter starts or ends."""
    return float(np.sqrt(np.mean(np.square(audio[len(audio) // 4 : -len(audio) // 4]))))


def assert_tone(audio: np.ndarray, seconds: float = 1.0, off_s: float = 0.002, level: float = 0.5) -> None:
    """The audio has the tone's length, pitch and loudness."""
    assert audio.dtype == np.float32
    assert abs(len(audio) / SPEECH_HZ - seconds) <= off_s
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    assert abs(np.argmax(spectrum) * SPEECH_HZ / len(audio) - TONE_HZ) < 4
    assert loudness(audio) == pytest.approx(level / 2**0.5, rel=0.06)


def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(body) if size is None else size) + body + b"\0" * (len(body) % 2)


def wav(
    samples: bytes, bits: int = 16, tag: int = PCM, rate_hz: int = SPEECH_HZ, channels: int = 1,
    size: int | None = None, before: bytes = b"", after: bytes = b"",
) -> bytes:  # fmt: skip
    """A WAV file; `size` stands in its header instead of the true sizes."""
    width = channels * bits // 8
    form = chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate_hz, rate_hz * width, width, bits))
    body = b"WAVE" + form + before + chunk(b"data", samples, size) + after
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def pcm16(audio: np.ndarray) -> bytes:
    return np.rint(audio * 32767).astype("<i2").tobytes()


def encoded(
    kind: str, codec: str, audio: np.ndarray, rate_hz: int, layout: str = "mono", options: dict[str, str] | None = None
) -> bytes:
    """A file by FFmpeg's muxers; audio is (channels, samples) or (samples,)."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate_hz)
        stream.layout = layout
        planes = np.ascontiguousarray(np.atleast_2d(audio), np.float32)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.sample_rate = rate_hz
        resampler = av.AudioResampler(stream.codec_context.format or "s16", layout, rate_hz)
        for converted in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_wav_whose_header_does_not_know_the_size(size: int) -> None:
    assert_tone(decode_audio(wav(pcm16(tone()), size=size)))


def test_wav_with_chunks_around_the_samples() -> None:
    notes = chunk(b"LIST", b"INFO" + chunk(b"INAM", b"Take 1\0") + chunk(b"IART", "Zoë".encode("latin-1")))
    assert_tone(decode_audio(wav(pcm16(tone()), before=notes + chunk(b"JUNK", bytes(29)), after=notes)))


def test_rf64() -> None:
    samples = pcm16(tone())
    sizes = struct.pack("<QQQI", len(samples) + 72, len(samples), len(samples) // 2, 0)
    file = wav(samples, size=UNKNOWN, before=b"")
    assert_tone(decode_audio(b"RF64" + file[4:12] + chunk(b"ds64", sizes) + file[12:]))


def _int24(audio: np.ndarray) -> bytes:
    return np.rint(audio * (2**23 - 1)).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


@pytest.mark.parametrize(
    ("bits", "tag", "convert"),
    [
        (8, PCM, lambda audio: np.rint(audio * 127 + 128).astype(np.uint8).tobytes()),
        (16, PCM, pcm16),
        (24, PCM, _int24),
        (32, PCM, lambda audio: np.rint(audio * (2**31 - 1)).astype("<i4").tobytes()),
        (32, FLOAT, lambda audio: audio.astype("<f4").tobytes()),
        (64, FLOAT, lambda audio: audio.astype("<f8").tobytes()),
    ],
)
def test_sample_formats_of_wav(bits: int, tag: int, convert: Callable[[np.ndarray], bytes]) -> None:
    assert_tone(decode_audio(wav(convert(tone()), bits, tag)))


@pytest.mark.parametrize("codec", ["pcm_mulaw", "pcm_alaw", "adpcm_ms", "adpcm_ima_wav"])
def test_telephone_codecs_in_wav(codec: str) -> None:
    block_s = 0.13  # ADPCM fills its last block
    assert_tone(decode_audio(encoded("wav", codec, tone(1, 8000), 8000)), off_s=block_s)


@pytest.mark.parametrize("rate_hz", [8000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_sample_rates(rate_hz: int) -> None:
    assert_tone(decode_audio(wav(pcm16(tone(1, rate_hz)), rate_hz=rate_hz)))


@pytest.mark.parametrize(
    ("kind", "codec", "rate_hz"),
    [
        ("aiff", "pcm_s16be", 44_100),
        ("caf", "pcm_s16le", 44_100),
        ("au", "pcm_s16be", 44_100),
        ("w64", "pcm_s16le", 44_100),
        ("flac", "flac", 44_100),
    ],
)
def test_uncompressed_and_lossless_containers(kind: str, codec: str, rate_hz: int) -> None:
    assert_tone(decode_audio(encoded(kind, codec, tone(1, rate_hz), rate_hz)))


def test_amr_of_a_telephone() -> None:
    silence = b"\x3c" + bytes(31)  # a frame of 12.2 kbit/s, 20 ms (RFC 4867, section 5.3)
    assert abs(len(decode_audio(b"#!AMR\n" + silence * 50)) - SPEECH_HZ) <= 320


@pytest.mark.parametrize("seconds", [1.0, 2.345])
@pytest.mark.parametrize(("kind", "codec"), [("mp3", "libmp3lame"), ("ogg", "libopus"), ("mp4", "aac")])
def test_compressed_audio_has_the_length_it_was_made_of(kind: str, codec: str, seconds: float) -> None:
    """Encoder delay and padding are cut, as the headers of MP3 and Opus ask for; of AAC both remain."""
    off_s = 2 * 1024 / 48_000 if codec == "aac" else 0.002
    assert_tone(decode_audio(encoded(kind, codec, tone(seconds, 48_000), 48_000)), seconds, off_s)


def test_mp3_with_an_image_in_its_id3_tag() -> None:
    image = b"\x00image/png\x00\x03\x00" + bytes(range(256)) * 300
    frame = b"APIC" + struct.pack(">I", len(image)) + b"\0\0" + image
    size = bytes((len(frame) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    tag = b"ID3\x03\x00\x00" + size + frame
    assert_tone(decode_audio(tag + encoded("mp3", "libmp3lame", tone(1, 44_100), 44_100)))


def test_webm_of_a_browser_has_no_duration() -> None:
    """MediaRecorder streams: clusters of unknown size, no duration, no index."""
    file = encoded("webm", "libopus", tone(1, 48_000), 48_000, options={"live": "1"})
    with av.open(io.BytesIO(file)) as container:
        assert container.duration is None
    assert_tone(decode_audio(file), off_s=0.02)


def test_fragmented_mp4_of_a_browser() -> None:
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "200000"}
    file = encoded("mp4", "aac", tone(1, 48_000), 48_000, options=options)
    assert file.count(b"moof") > 3
    assert_tone(decode_audio(file), off_s=0.05)


@pytest.mark.parametrize("side", [0, 1])
def test_speech_on_one_side_of_a_stereo_file(side: int) -> None:
    both = np.zeros((SPEECH_HZ, 2))
    both[:, side] = tone()
    assert_tone(decode_audio(wav(pcm16(both), channels=2)), level=0.25)


def test_both_sides_of_a_stereo_file_are_mixed_without_getting_louder() -> None:
    assert_tone(decode_audio(wav(pcm16(np.stack([tone(), tone()], 1)), channels=2)))


def test_speech_in_the_centre_of_a_video() -> None:
    planes = np.zeros((6, 48_000))
    planes[2] = tone(1, 48_000)  # FL FR FC LFE BL BR
    audio = decode_audio(encoded("flac", "flac", planes, 48_000, "5.1"))
    assert loudness(audio) > 0.05, "the centre is in the mix"
    assert_tone(audio / loudness(audio) * (0.5 / 2**0.5))


@pytest.mark.parametrize("name", ["speech.txt", ""])
def test_the_content_names_the_format_not_the_file(name: str) -> None:
    part = Media().audio(wav(pcm16(tone())))
    assert (part.length, part.sample_rate) == (SPEECH_HZ, SPEECH_HZ)


@pytest.mark.parametrize("samples", [1, 2, 79])
def test_a_few_samples_are_audio(samples: int) -> None:
    assert len(decode_audio(wav(pcm16(tone())[: 2 * samples]))) == samples


def test_what_is_louder_than_full_scale_is_clipped() -> None:
    audio = decode_audio(wav((4 * tone()).astype("<f4").tobytes(), 32, FLOAT))
    assert audio.max() == 1.0 and audio.min() == -1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [4, 8])
def test_samples_that_are_not_numbers_are_refused(bad: float, width: int) -> None:
    audio = tone()
    audio[9000] = bad
    with pytest.raises(MediaError, match="not finite"):
        decode_audio(wav(audio.astype(f"<f{width}").tobytes(), 8 * width, FLOAT))


def test_a_file_without_samples_is_refused() -> None:
    with pytest.raises(MediaError, match="empty"):
        decode_audio(wav(b""))


REFUSED: Sequence[bytes] = [b"", b"RIFF", b"hello there", b"#EXTM3U\nhttp://127.0.0.1/x.wav\n", bytes(4096)]


@pytest.mark.parametrize("data", REFUSED)
def test_other_content_is_refused_with_the_formats_that_are_read(data: bytes) -> None:
    with pytest.raises(MediaError, match=r"not a supported audio file \(WAV, MP3, FLAC, .*AMR\)") as caught:
        decode_audio(data)
    assert "<none>" not in str(caught.value)


def test_every_prefix_of_a_file_is_read_or_refused() -> None:
    for kind, codec in (("mp3", "libmp3lame"), ("ogg", "libopus"), ("mp4", "aac"), ("flac", "flac")):
        file = encoded(kind, codec, tone(0.3, 48_000), 48_000)
        for end in range(0, len(file), max(1, len(file) // 40)):
            with contextlib.suppress(MediaError):
                assert len(decode_audio(file[:end])) <= 0.4 * SPEECH_HZ


def test_long_audio_is_refused_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SPEECH_S", 1)
    with pytest.raises(MediaError, match="at most 1 seconds"):
        decode_audio(wav(pcm16(tone(1.2))))
