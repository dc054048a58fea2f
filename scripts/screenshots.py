"""Take the pictures of the dashboard in docs/img anew, from a real job on this machine.

    python scripts/screenshots.py [FOLDER]

The job trains on simulated hosts. A worker is killed, the job is scaled, and stacks are taken. The
operator's pages have the status of this job, and made-up ones, from a small API server. The script
needs Chromium and the packages of the browser tests, and takes about two minutes. Look at the
pictures before you commit them: nothing checks what they show.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import FloatRect, Page, expect, sync_playwright

from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import HostFault, JobEvent, JobPhase, JobStatus
from tests.operator_pages import TOKEN, elastic_job, operator_pages

ROOT = Path(__file__).resolve().parents[1]
DLROVER = str(Path(sys.executable).with_name("dlrover"))
NAME, WIDTH = "gpt-small", 1100
SCRIPT = """
import math, time
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader

dist.init_process_group("gloo")
loader = ElasticLoader(TensorDataset(torch.arange(192_000)), global_batch=64)
state = {"data": loader, "w": torch.zeros(200_000)}
with Checkpointer("store", every=25, persist_every=150) as checkpointer:
    checkpointer.load(state)
    for step in loader:
        for batch in step:
            time.sleep(0.05)
        step.commit()
        loss = 2.5 * math.exp(-loader.steps / 300) + 0.3
        session.report_step(loader.steps, 3000, loss=loss)
        checkpointer.save(loader.steps, state)
        if checkpointer.should_stop:
            break
        if loader.steps % 20 == 0:
            print(f"step {loader.steps}: loss {loss:.3f}", flush=True)
"""
JOB = f"""
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: {NAME}
spec:
  replicaSpecs:
    worker:
      replicas: 2
      minReplicas: 1
      maxReplicas: 3
      template:
        spec:
          containers:
            - name: main
              image: unused
              command: ["elastic-run", "train.py"]
"""


def main() -> int:
    """Run the job, take the pictures, and end the job; return the exit status."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/img"
    with tempfile.TemporaryDirectory(prefix="screenshots-") as place:
        work = Path(place)
        (work / "train.py").write_text(SCRIPT)
        (work / "job.yaml").write_text(JOB)
        folders = [f"DLROVER_STATE_DIR={work}/state", f"DLROVER_RUNTIME_DIR={work}/r"]
        dlrover = ["env", *folders, DLROVER, "job"]
        command = [*dlrover, "run", "job.yaml", "--nodes=3", "--json", "--dashboard"]
        run = subprocess.Popen(
            command, cwd=work, text=True, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert run.stderr is not None
            link = next(
                found[1]
                for line in run.stderr
                if (found := re.search(r"the dashboard is at (\S+)", line))
            )
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            flags = ["--no-sandbox"] if os.getuid() == 0 else []
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=chromium, args=flags)
                page = browser.new_page(viewport={"width": WIDTH, "height": 900})
                page.set_default_timeout(120_000)
                expect.set_options(timeout=120_000)
                running = take(page, link, folder, dlrover, work)
                of_operator(page, running, folder, work)
                browser.close()
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(60)
    return 0


def status_of(dlrover: list[str]) -> dict[str, Any]:
    """Return the job's newest status."""
    described = subprocess.run(
        [*dlrover, "describe", NAME, "--json"],
        capture_output=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(described.stdout)["status"]
    return found


def take(page: Page, link: str, folder: Path, dlrover: list[str], work: Path) -> JobStatus:
    """Drive the job from its page, take the pictures, and return the last status.

    Args:
        page: page of a browser.
        link: link to the page of the job.
        folder: folder of the pictures.
        dlrover: beginning of a command about the job.
        work: folder of the job.
    """
    page.goto(link)
    expect(page.locator("#checkpoints tr")).to_have_count(4)
    nodes = status_of(dlrover)["nodes"]
    os.kill(nodes[1]["pids"][0], signal.SIGKILL)
    expect(page.locator("#rounds svg[role=img]")).to_contain_text("round 2")
    expect(page.locator("#head dt:text('newest checkpoint') + dd")).to_contain_text("step")
    expect(page.locator("#checkpoints")).to_contain_text("2 of 2 members")
    page.get_by_role("spinbutton", name="nodes").fill("3")
    page.get_by_role("button", name="Scale").click()
    expect(page.locator("#rounds svg[role=img]")).to_contain_text("round 3")
    expect(page.locator("#checkpoints")).to_contain_text("3 of 3 members")
    page.get_by_role("button", name="Take stacks").click()
    expect(page.locator("#stacks pre")).to_contain_text("rank")
    expect(page.get_by_role("img", name=re.compile("3 nodes: trains"))).to_be_visible()
    page.wait_for_timeout(6000)  # the pictures change every five seconds
    rename(page, work)
    picture(page, folder / "dashboard.png", "#time")
    expect(page.locator("#checkpoints")).to_contain_text("written in")
    rename(page, work)
    picture(page, folder / "dashboard-lower.png", "#curves", first="#ranks")
    page.get_by_role("link", name="n1", exact=True).click()
    expect(page.locator("#log")).to_contain_text("loss")
    rename(page, work)
    picture(page, folder / "dashboard-node.png", "#evidence")
    page.get_by_role("link", name="Jobs").click()
    expect(page.locator(".phase")).to_have_text("Running")
    picture(page, folder / "dashboard-jobs.png", "table")
    page.goto("about:blank")
    return JobStatus.model_validate(status_of(dlrover))


def of_operator(page: Page, running: JobStatus, folder: Path, work: Path) -> None:
    """Take the pictures of the operator's pages.

    Args:
        page: page of a browser.
        running: status of a job.
        folder: folder of the pictures.
        work: folder of the job.
    """
    nodes = [n.model_copy(update={"host": f"gpu-{i + 1}"}) for i, n in enumerate(running.nodes)]
    fault = HostFault(host="gpu-4", at=running.started_at, kind=HostFaultKind.HARDWARE)
    running = running.model_copy(update={"nodes": nodes, "host_faults": [fault]})
    none: dict[str, Any] = {"nodes": [], "ready": 0, "nodes_in_round": 0, "host_faults": []}
    empty = running.model_copy(
        update=none | {"progress": None, "goodput": None, "desired": 8, "phase": JobPhase.PENDING}
    )
    over = "node n1 has failed 4 times, and may fail 3 times"
    at, number = running.published_at, max(event.id for event in running.events) + 1
    end = JobEvent(
        id=number, at=at, reason=EventReason.RESTARTS_EXHAUSTED, message=over, type="Warning"
    )
    told = {"reason": over, "ended_at": at, "events": [*running.events, end]}
    failed = running.model_copy(update=none | told | {"phase": JobPhase.FAILED})
    words = "queue nightly has no room: 8 nodes are asked for, and 5 are free"
    condition = {"type": "Admitted", "status": "False", "reason": "Waiting", "message": words}
    ended = {"type": "Failed", "status": "True", "reason": "RestartsExhausted", "message": over}
    jobs = [
        elastic_job("team-a", NAME, running, badHosts={"hosts": ["gpu-4"], "avoid": ["gpu-4"]}),
        elastic_job(
            "team-a", "gpt-large", empty, queue="nightly", reason="Waiting", conditions=[condition]
        ),
        elastic_job("team-b", "ranking", failed, reason="RestartsExhausted", conditions=[ended]),
    ]
    with operator_pages(jobs) as link:
        page.goto(link + "enter")
        picture(page, folder / "operator-enter.png", "main")
        page.get_by_label("token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("tr")).to_have_count(4)
        picture(page, folder / "operator-jobs.png", "table")
        page.get_by_role("link", name="ranking").click()
        expect(page.locator("h1")).to_contain_text("ranking")
        rename(page, work)
        picture(page, folder / "operator-job.png", "#rounds")
        page.get_by_role("link", name="Hosts").click()
        expect(page.locator("h1")).to_have_text("Hosts of the cluster")
        picture(page, folder / "operator-hosts.png", "table")
        page.goto("about:blank")


def rename(page: Page, work: Path) -> None:
    """Show the folders of this machine by the names that they usually have."""
    names = {str(work): "/home/ann/gpt", str(ROOT): "/opt/dlrover", sys.base_prefix: "/usr"}
    page.evaluate(
        """names => {
          const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          while (texts.nextNode())
            for (const [name, shown] of Object.entries(names))
              texts.currentNode.data = texts.currentNode.data.replaceAll(name, shown);
        }""",
        names,
    )


def picture(page: Page, path: Path, last: str, first: str = "body") -> None:
    """Take a picture of a page, in 256 colours, so that the file is small.

    Args:
        page: page of a browser.
        path: path of the picture.
        last: selector of the last element that is in it.
        first: selector of the first element that is in it.
    """
    page.evaluate("scrollTo(0, 0)")
    begin, end = page.locator(first).bounding_box(), page.locator(last).bounding_box()
    assert begin is not None
    assert end is not None
    height = end["y"] + end["height"] + 24 - begin["y"]
    clip: FloatRect = {"x": 0, "y": begin["y"], "width": WIDTH, "height": height}
    page.screenshot(path=path, full_page=True, clip=clip)
    with Image.open(path) as taken:
        few = taken.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
