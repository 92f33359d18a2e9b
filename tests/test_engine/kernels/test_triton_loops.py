"""What benchmarks/compiled/loops.py counts in machine code: innermost loops, instructions by kind,
the bytes that they load, and how long they keep each part of a multiprocessor busy.
"""

from compiled.loops import Loop, describe_loop, loops_of, parse

# An outer loop around an inner one with a copy, a product and their surroundings; a jump to itself.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R29+0x400], desc[UR18][R24.64], !P0 ;
        /*0030*/              @!P1 LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0040*/                   LDSM.16.MT88.4 R32, [R5+UR11+0x8080] ;
        /*0050*/                   HMMA.16816.F32.BF16 R40, R48.reuse, R24, R40 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0070*/                   MUFU.EX2 R3, R3 ;
        /*0080*/                   IMAD.WIDE R24, R9, 0x8000, R8 ;
        /*0090*/                   FFMA R5, R6, R7, -R8 ;
        /*00a0*/                   LDL R11, [R1+0x20] ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00d0*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*00e0*/                   STG.E desc[UR4][R2.64], R5 ;
        /*00f0*/               @P1 BRA `(.L_x_0) ;
        /*0100*/                   EXIT ;
.L_x_3:
        /*0110*/                   BRA `(.L_x_3);
"""


def test_an_iteration_of_an_innermost_loop_is_counted() -> None:
    (found,) = loops_of(list(parse(LISTING)), warps=8)
    assert found.instructions == 12 and found.barriers == 1
    assert found.kinds == {
        "tensor": 2, "copy": 1, "global": 1, "local": 1, "shared": 1, "mufu": 1, "float": 1,
        "wait": 1, "uniform": 1, "integer": 2,
    }  # fmt: skip
    threads = 8 * 32
    assert found.loaded == threads * (16 + 8)
    # Each quarter of a multiprocessor runs two of eight warps.
    assert found.issue == 2 * 12
    assert found.arithmetic == 2 * 8, "16 threads a clock of a multiprocessor"
    assert found.tensor == 2 * (16 * 8 * 16 + 64 * 128 * 16 / 4) / 512
    assert found.shared == threads * (16 + 16) / 128
    assert "12 instructions" in describe_loop(found)


def test_the_share_is_of_the_time_that_memory_takes() -> None:
    loop = Loop(100, {}, 0, 18600, issue=300, arithmetic=500, tensor=400, shared=200)
    assert round(loop.memory) == 1000 and round(loop.share, 9) == 0.5
