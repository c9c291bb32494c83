"""The messages of a rank whose NCCL watchdog detects a collective that does not end (torch 2.13, ProcessGroupNCCL.cpp)."""

SAYS = ("[rank{rank}]:[E1125 02:49:05.112 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600029 "
        "milliseconds before timing out.")
ENDS = ["terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: [Rank 1] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600029 milliseconds before timing out.", "Exception raised from checkTimeout at …"]


def said(rank: int, number: int = 12, operation: str = "ALLREDUCE") -> list[str]:
    return ["step 11", SAYS.format(rank=rank, number=number, operation=operation), *ENDS]
