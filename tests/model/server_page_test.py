#!/usr/bin/env python3
"""The pages of `crumb serve` in headless Chromium, on a desk's and a phone's width: what they show is what the server says,
nothing sticks out, nothing is loaded from elsewhere. Skipped (77) where there is no Chromium.

usage: page_test.py CRUMB MODEL.gguf         SCREENSHOTS=FOLDER keeps what was seen
"""
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import server
from server import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = {"desk": (1280, 860, False), "phone": (390, 844, True)}


class Browser:
    """Chromium's DevTools protocol over a pipe: JSON objects that end in a zero byte."""

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()

        def pipes():  # the browser reads 3 and writes 4
            a, b = os.dup(to_browser), os.dup(from_browser)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
             "--no-first-run", "--disable-background-networking", "--disable-extensions", f"--user-data-dir={self.profile.name}"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.sent, self.rest, self.events = 0, b"", []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(domain + ".enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        os.close(self.read)
        os.close(self.write)
        self.profile.cleanup()

    def message(self):
        while b"\0" not in self.rest:
            block = os.read(self.read, 1 << 20)
            if not block:
                raise AssertionError("the browser is gone")
            self.rest += block
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def command(self, method, **parameters):
        self.sent += 1
        call = {"id": self.sent, "method": method, "params": parameters}
        if hasattr(self, "session"):
            call["sessionId"] = self.session
        os.write(self.write, json.dumps(call).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.sent:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def value(self, script):
        result = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, script, seconds=120):
        end = time.monotonic() + seconds
        while not self.value(script):
            if time.monotonic() > end:
                raise AssertionError(f"it never came true: {script}; the page says:\n{self.value('document.body.innerText')}")
            time.sleep(0.1)

    def go(self, url, width, height, mobile):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1, mobile=mobile)
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def screenshot(self, name):
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            with open(os.path.join(folder, name + ".png"), "wb") as f:
                f.write(base64.b64decode(self.command("Page.captureScreenshot")["data"]))


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server("--kv", "quarot:paper", "--kv-recent", "64", "-c", "4096", "-np", "2"))
        cls.browser = cls.enterClassContext(Browser())
        cls.url = f"http://127.0.0.1:{cls.server.port}"

    def looks_right(self, name):
        browser = self.browser
        self.assertLessEqual(browser.value("document.documentElement.scrollWidth"), browser.value("window.innerWidth"), "it sticks out")
        self.assertTrue(browser.value("document.getElementById('error')?.hidden ?? true"))
        browser.screenshot(name)
        for event in browser.events:
            parameters = event.get("params", {})
            if event["method"] == "Network.requestWillBeSent":
                self.assertTrue(parameters["request"]["url"].startswith((self.url, "about:", "data:")), parameters["request"]["url"])
            self.assertNotEqual(event["method"], "Runtime.exceptionThrown", event)
            if event["method"] == "Log.entryAdded" and "favicon" not in parameters["entry"].get("url", ""):
                self.assertNotEqual(parameters["entry"]["level"], "error", parameters)

    def test_an_empty_cache(self):
        self.server.erase()
        self.browser.go(self.url + "/kv", *WIDTHS["desk"])
        self.browser.until("document.body.innerText.includes('No sequence is live')")
        self.looks_right("kv-empty")

    def test_the_cache(self):
        text = "A page holds 64 tokens of one head of one layer. " * 60
        for slot, more in enumerate(("One", "Another")):
            self.server.ask(text + more, n=4, id_slot=slot)
        now = self.server.call("/kv.json")
        for name, size in WIDTHS.items():
            with self.subTest(name):
                self.browser.go(self.url + "/kv", *size)
                self.browser.until("document.querySelectorAll('.sequence').length === 2")
                for kind, number in (("sink", 2), ("shared", 2 * now["sequences"][0]["shared"])):
                    self.assertEqual(self.browser.value(f"document.querySelectorAll('.sequence i.{kind}').length"), number)
                self.assertIn(f"{now['sequences'][0]['tokens']:,} tokens", self.browser.value("document.body.innerText"))
                self.looks_right("kv-" + name)

    def test_a_chat(self):
        browser = self.browser
        for name, size in WIDTHS.items():
            with self.subTest(name):
                self.server.erase()
                browser.go(self.url + "/", *size)
                browser.until("document.getElementById('held').textContent.startsWith('Empty')")
                for turn, question in enumerate(("What is a key-value cache? Explain it in a few sentences.", "Now tell me a story of a thousand words.")):
                    browser.value(f"document.getElementById('text').value = {json.dumps(question)}")
                    browser.value("document.getElementById('send').click()")
                    browser.until("document.getElementById('send').textContent === 'Stop'")
                    browser.until("document.querySelectorAll('.message.assistant p')[%d]?.textContent.length > 10" % turn)
                    if turn == 0:
                        before = browser.value("document.querySelectorAll('.message.assistant p')[0].textContent")
                        browser.until("document.querySelectorAll('.message.assistant p')[0].textContent.length > %d" % len(before))
                    if turn == 1:
                        browser.value("document.getElementById('send').click()")  # stop
                    browser.until("document.getElementById('send').textContent === 'Send'")
                self.assertIn("Stopped.", browser.value("document.getElementById('log').innerText"))
                self.assertEqual(browser.value("document.querySelectorAll('.message').length"), 4)
                self.assertEqual(browser.value("document.querySelectorAll('.bad').length"), 0)
                browser.until("document.querySelectorAll('#pages i.sink').length === 1")
                self.assertIn("tokens in", browser.value("document.getElementById('held').textContent"))
                self.assertIn("came from the cache", browser.value("document.getElementById('log').innerText"))
                self.looks_right("chat-" + name)
                browser.value("document.getElementById('new').click()")
                self.assertEqual(browser.value("document.querySelectorAll('.message').length"), 0)


if __name__ == "__main__":
    if not CHROMIUM:
        print("page_test: skipped: there is no Chromium. Type: apt-get install chromium")
        sys.exit(77)
    server.main()
