"""/health: the engine's own word that it takes steps. Its failing is in test_launch."""


def test_health_comes_with_the_engines_numbers(http):
    before = http.get("/health").json()
    assert before["status"] == "ok"
    assert before["engine"]["num_blocks"] == 512
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()
    after = http.get("/health").json()
    assert after["engine"]["num_steps"] >= before["engine"]["num_steps"] + 3
