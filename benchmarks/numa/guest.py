"""Starts a guest with two memory nodes, whose files are this machine's, and runs a command there.

    apt-get install qemu-system-x86 busybox-static cpio
    apt-get download linux-image-6.1.0-50-amd64 && dpkg-deb -x linux-image-*.deb KERNEL
    python -m benchmarks.numa.guest --kernel KERNEL                     # benchmarks.numa.placement
    python -m benchmarks.numa.guest --kernel KERNEL -- python -m quire doctor

For x86-64. The guest sees this machine's file system read-only (9p), has folders for temporary
files in its own memory, no network, and ends with the command. Where there is no /dev/kvm that
works, it is emulated on one core, some thirty times slower than the machine: nothing that is timed
there says anything about speed.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES = (
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci",
    "fs/netfs/netfs",
    "fs/fscache/fscache",
    "net/9p/9pnet",
    "net/9p/9pnet_virtio",
    "fs/9p/9p",
)
"""For virtio and 9p, in the order in which they are loaded; some may be in the kernel itself."""

INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for module in {modules}; do
  if [ -e /modules/$module.ko ]; then $b insmod /modules/$module.ko; fi
done
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose root /new \\
  || $b poweroff -f
for folder in proc sys dev; do $b mount --move /$folder /new/$folder; done
$b mkdir -p /new/dev/shm
for folder in run dev/shm; do $b mount -t tmpfs tmpfs /new/$folder; done
$b ip link set lo up
$b chroot /new /bin/sh -c "$($b cat /command)"
echo guest: exit code $?
$b poweroff -f
"""

NODE_MIB = 1536
END = "guest: exit code "


def main() -> int:
    """Run the command in the guest; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", type=Path, required=True, help="an unpacked kernel package")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("--kvm", action="store_true", help="use /dev/kvm")
    parser.add_argument("command", nargs="*", help="default: benchmarks.numa.placement")
    arguments = parser.parse_args()
    words = arguments.command or ["python", "-m", "benchmarks.numa.placement"]
    if words[0] == "python":
        words[0] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        image = make_image(Path(folder), arguments.kernel, words)
        command = machine(arguments.kernel, image, kvm=arguments.kvm)
        command = ["timeout", str(arguments.timeout), *command]
        code = 1
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, errors="replace"
        ) as guest:
            assert guest.stdout is not None
            for line in guest.stdout:
                print(line.rstrip(), flush=True)
                if line.startswith(END):
                    code = int(line.removeprefix(END))
        return code


def make_image(folder: Path, kernel: Path, words: list[str]) -> Path:
    """The file system that the guest starts with: busybox, modules, the command."""
    root = folder / "root"
    for name in ("bin", "modules", "new", "proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "apt-get install busybox-static"
    shutil.copy(busybox, root / "bin/busybox")
    (tree,) = kernel.glob("lib/modules/*/kernel")
    for module in MODULES:
        if (tree / f"{module}.ko").exists():
            shutil.copy(tree / f"{module}.ko", root / "modules")
    names = " ".join(Path(module).name for module in MODULES)
    (root / "init").write_text(INIT.format(modules=names))
    (root / "init").chmod(0o755)
    source = Path("src").resolve()
    variables = f"OMP_NUM_THREADS=1 TMPDIR=/run HOME=/run PYTHONPATH={source}:{Path.cwd()}"
    (root / "command").write_text(
        f"cd {shlex.quote(os.getcwd())}; export {variables}; {shlex.join(words)}\n"
    )
    image = folder / "image"
    with image.open("wb") as file:
        names_of_files = subprocess.run(["find", "."], cwd=root, stdout=subprocess.PIPE, check=True)
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            cwd=root,
            input=names_of_files.stdout,
            stdout=file,
            check=True,
        )
    return image


def machine(kernel: Path, image: Path, *, kvm: bool) -> list[str]:
    """The command that starts the guest: two nodes with two cores each."""
    (binary,) = kernel.glob("boot/vmlinuz-*")
    nodes = []
    for node in (0, 1):
        nodes += ["-object", f"memory-backend-ram,id=m{node},size={NODE_MIB}M"]
        nodes += ["-numa", f"node,nodeid={node},cpus={2 * node}-{2 * node + 1},memdev=m{node}"]
    return [
        *("nice", "-n", "15"),
        *("qemu-system-x86_64", "-accel", "kvm" if kvm else "tcg,thread=single"),
        *("-cpu", "max", "-smp", "4,sockets=2,cores=2", "-m", f"{2 * NODE_MIB}M"),
        *nodes,
        *("-numa", "dist,src=0,dst=1,val=21"),
        *("-kernel", str(binary), "-initrd", str(image)),
        *("-append", "console=ttyS0 quiet panic=-1"),
        *("-nographic", "-no-reboot", "-net", "none"),
        "-virtfs",
        "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
    ]


if __name__ == "__main__":
    sys.exit(main())
