"""The chat page in a real browser, against a running server.

    python browser.py http://127.0.0.1:8000 [FOLDER FOR SCREENSHOTS] [BROWSER]

Needs playwright and a Chromium (by default /usr/bin/chromium). Exits with 1 where something is
wrong.
"""

import json
import pathlib
import sys

from playwright.sync_api import expect, sync_playwright

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
SHOTS = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "screenshots")
BROWSER = sys.argv[3] if len(sys.argv) > 3 else "/usr/bin/chromium"
SHOTS.mkdir(parents=True, exist_ok=True)

MARKDOWN = (
    "# Title\n\nSome **bold** and `code` and <script>alert(1)</script>.\n\n- one\n- two\n\n1. first\n2. second\n\n"
    "```rust\nfn main() { println!(\"<b>\"); }\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
)


def chunks(text, thought=""):
    """A stream as the server sends it, three characters a chunk, two chunks a pass."""
    def event(delta, **more):
        choice = {"index": 0, "delta": delta, "finish_reason": None} | more
        return "data: " + json.dumps({"choices": [choice], "usage": None}) + "\n\n"

    out = event({"role": "assistant", "content": ""})
    for start in range(0, len(thought), 3):
        out += event({"reasoning_content": thought[start : start + 3]})
    for n, start in enumerate(range(0, len(text), 3)):
        out += event({"content": text[start : start + 3]}, **{"pass": n // 2})
    draft = {"tokens": ["a", " b", " c", "\n", " d"], "parents": [-1, 0, 0, 1, 3], "path": [0, 1, 3], "next": "e", "log_chances": [0, -1, -2, -1, -2]}
    out += event({}, draft=draft)
    out += event({}, finish_reason="stop")
    usage = {"prompt_tokens": 9, "completion_tokens": 40, "spec_verify_ct": 20, "prompt_tokens_details": {"cached_tokens": 4}}
    return out + "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\ndata: [DONE]\n\n"


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-background-networking", "--disable-component-update"])
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append("asks for " + request.url) if not request.url.startswith((URL, "data:")) else None)

    # The real model: an answer comes, with its figures; stopping; regenerating.
    page.goto(URL)
    expect(page.locator("#model")).not_to_be_empty()
    page.click("#tune")
    page.fill("#max_tokens", "40")
    page.fill("#seed", "1")
    page.click("#tune")
    page.fill("#ask", "Write a short sentence about trees.")
    page.keyboard.press("Enter")
    expect(page.locator(".figures .again")).to_be_visible(timeout=120_000)
    first = page.locator(".turn.assistant .text").inner_text()
    assert first.strip(), "no answer"
    expect(page.locator(".figures")).to_contain_text("tokens/s")
    assert page.locator(".plain").text_content(), "no tokens by pass"
    page.screenshot(path=SHOTS / "answer.png")
    page.click(".again")
    expect(page.locator(".figures .again")).to_be_visible(timeout=120_000)
    assert page.locator(".turn.assistant").count() == 1
    assert page.locator(".turn.assistant .text").inner_text() == first, "the same seed, another answer"
    # A second turn, stopped with Escape.
    page.click("#tune")
    page.fill("#max_tokens", "")
    page.click("#tune")
    page.fill("#ask", "Count from one to a thousand, in words.")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant").nth(1).locator(".text")).not_to_be_empty(timeout=120_000)
    page.keyboard.press("Escape")
    expect(page.locator(".turn.assistant").nth(1).locator(".figures")).to_contain_text("Regenerate", timeout=10_000)
    # The last question comes back.
    page.keyboard.press("ArrowUp")
    assert "thousand" in page.input_value("#ask") and page.locator(".turn").count() == 2
    # Settings outlive a reload.
    page.reload()
    assert page.input_value("#seed") == "1"

    # A scripted answer: thought, markdown, colours by pass; markup stays text.
    def scripted(route):
        route.fulfill(status=200, content_type="text/event-stream", body=chunks(MARKDOWN, "Let me think.\nYes."))

    page.route("**/v1/chat/completions", scripted)
    page.fill("#ask", "Show everything")
    page.keyboard.press("Enter")
    expect(page.locator(".figures .again")).to_be_visible()
    text = page.locator(".turn.assistant .text")
    for selector in ("h1", "strong", "ul li", "ol li", "pre code", "table td"):
        assert text.locator(selector).count(), selector
    assert text.locator("script").count() == 0 and "<script>" in text.inner_text()
    thought = page.locator("details.thought")
    expect(thought).to_be_visible()
    assert thought.get_attribute("open") is None
    assert page.locator(".plain span").count() > 10
    classes = set(page.locator(".plain span").evaluate_all("nodes => nodes.map(node => node.className)"))
    assert len(classes) > 3, classes
    expect(page.locator(".figures")).to_contain_text("tokens per pass")
    page.locator("details:not(.thought) summary").click()
    assert page.locator(".tree svg g").count() == 5 and page.locator(".tree g.accepted").count() == 3
    page.screenshot(path=SHOTS / "markdown.png")
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=SHOTS / "dark.png")

    # An error is told.
    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=429, content_type="application/json", body='{"error": {"message": "too many"}}'),
    )
    page.fill("#ask", "Again")
    page.keyboard.press("Enter")
    expect(page.locator(".error")).to_have_text("too many")
    problems = [problem for problem in problems if "429" not in problem]

    # A phone.
    phone = browser.new_page(viewport={"width": 390, "height": 780}, device_scale_factor=2)
    phone.route("**/v1/chat/completions", scripted)
    phone.goto(URL)
    phone.fill("#ask", "Show everything")
    phone.click("#send")
    expect(phone.locator(".figures .again")).to_be_visible()
    wide = phone.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not wide, "the page is wider than a phone"
    phone.screenshot(path=SHOTS / "phone.png")
    browser.close()
    assert not problems, problems
print("ok")
