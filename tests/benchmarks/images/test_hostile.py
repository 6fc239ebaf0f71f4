"""A sample of hostile images: each is read, or refused in one sentence. The whole takes longer."""

import asyncio
import base64
from pathlib import Path

from benchmarks.images.hostile import is_sentence, make_service, run
from benchmarks.images.hostile_files import (
    GROUPS,
    bombs,
    chunks,
    exif,
    other_formats,
    picture,
    saved,
)
from benchmarks.images.hostile_urls import PRIVATE, HostileHosts, hostile_urls


def test_a_sample_is_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    groups = [group for group in GROUPS if group not in (bombs, chunks)]
    files = [file for group in groups for file in list(group())[::3]]
    files += [file for file in exif() if "orientation" in file[0]]
    urls = {name: f"data:;base64,{base64.b64encode(data).decode()}" for name, data in files}
    names_of_others = {name for name, _ in other_formats()}
    with HostileHosts(tmp_path) as hosts:
        urls = {"valid": f"data:;base64,{base64.b64encode(saved(picture())).decode()}"} | urls
        urls |= dict(hostile_urls(hosts))
        service = make_service(tmp_path, hosts)
        answers, _ = asyncio.run(run(service, urls, 8))
    assert len(dict(hostile_urls(hosts))) == 50
    wrong = {name: each for name, each in answers.items() if each != "image"}
    assert [name for name, each in wrong.items() if not is_sentence(each)] == []
    assert names_of_others & set(answers) <= set(wrong)
    assert answers["valid"] == answers["good"] == "image"
    assert all("not public" in answers[name] for name in PRIVATE)
    by_url = [answers[name] for name, _ in hostile_urls(hosts)]
    assert by_url.count("image") == 1
