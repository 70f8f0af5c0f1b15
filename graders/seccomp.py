"""A system-call filter for sandboxes: `syscall_filter() -> bytes`, a seccomp BPF program, or b"" on other machines.

Resource limits and bubblewrap already close the network and the file system. The filter closes what they leave: memory
that no limit counts (anonymous files, System V memory), new namespaces (a user namespace may mount file systems of any
size), other processes' memory, and kernel interfaces that only attackers need. Denied calls fail with EPERM; `clone3`
"does not exist" (ENOSYS), so that libc falls back to `clone`, whose flags a filter can read.
"""

import platform
import struct

# name: (x86_64, aarch64) system call numbers, Linux arch/*/entry/syscalls; from 424 on all machines share them.
DENIED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
}  # fmt: skip
CLONE = (56, 220)
CLONE3 = (435, 435)
NAMESPACE_FLAGS = 0x7E020000  # every CLONE_NEW* flag of <linux/sched.h>
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

# <linux/bpf_common.h>, <linux/seccomp.h>
LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little endian)


def syscall_filter() -> bytes:
    """The filter for this machine, as bubblewrap's `--seccomp` reads it: 8 bytes per instruction."""
    if platform.machine() not in MACHINES:
        return b""
    column, architecture = MACHINES[platform.machine()]
    program = [(LOAD_WORD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, EPERM)]
    program += [(LOAD_WORD, 0, 0, NUMBER)]
    program += [(JUMP_AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, EPERM)]  # x86's second ABI (x32)
    for numbers in DENIED.values():
        program += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, EPERM)]
    program += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ENOSYS)]
    program += [(JUMP_EQUAL, 0, 3, CLONE[column]), (LOAD_WORD, 0, 0, FIRST_ARGUMENT)]
    program += [(JUMP_ANY_BIT, 0, 1, NAMESPACE_FLAGS), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
