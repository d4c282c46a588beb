"""Apple's chips, M1 to M5. Pure.

Of each the largest memory sold (machine_names has the others) and all GPU cores; where chips of one name
differ in bandwidth, so do their memory sizes, and each is here. The FP16 rates published for M1 and M2 are
about twice their FP32 rates; github.com/philipturner/metal-benchmarks found FP16 no faster than FP32 on M1.
No rates of M5: those of the matrix units in its GPU's cores are not published.
"""

from __future__ import annotations

from harness.theory.machine import Machine
from harness.theory.machines.given import FROM_MEMORY, LLAMA_CPP, Given, apple

_KARPATHY = "no type said, twice the FP32 rate; Karpathy on that article: https://simonwillison.net/2023/Aug/16/andrej-karpathy"
_M1_MEMORY = (
    "Mac Life 3/2021: https://www.magzter.com/stories/Technology/Mac-Life/MacBook-Air-13inch-late2020"
)
_M1 = "Apple, by MacRumors: https://www.macrumors.com/2020/11/10/apple-announces-m1-chip-for-the-mac/"
_M2 = (
    "Apple, by MacRumors: "
    "https://www.macrumors.com/2022/06/06/apple-announces-m2-chip-with-support-for-up-to-24gb-memory/"
)
_M2_PRO_MAX = (
    "Apple: https://www.apple.com/newsroom/2023/01/"
    "apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/"
)
_M2_ULTRA = "Apple: https://www.apple.com/newsroom/2023/06/apple-introduces-m2-ultra/"
_M2_CORES = "of M2 Ultra's 76 cores at 27.2 TFLOP/s: https://en.wikipedia.org/wiki/Apple_M2#GPU"
_M1_PRO_MAX = (
    "Apple, by Digital Notebook: https://digitalnotebook.online/en/notebook/how-fast-is-a-16-inch-macbook-pro-with-"
    "m1-max-demonstrate-high-performance-that-not-only-intel-cpu-but-also-geforce"
)
_M1_ULTRA = "Apple, by MacRumors: https://www.macrumors.com/2022/03/08/apple-announces-m1-ultra-chip/"
_M1_ULTRA_RATE = "CPU-Monkey: https://www.cpu-monkey.com/en/cpu-apple_m1_ultra_64_gpu"
_M3 = "Ars Technica, by https://abachy.com/news/apples-m3-series-chips-enhanced-performance-and-advanced-gpus"
_M3_BUS = (
    "6,400 MT/s over 16 bits a controller, 8 of M3, 12 of M3 Pro, 32 of M3 Max (Apple rounds down), "
    "Wikipedia: "
    "https://wikihandbk.com/wiki/%D0%90%D0%BD%D0%B3%D0%BB%D0%B8%D0%B9%D1%81%D0%BA%D0%B0%D1%8F_"
    "%D0%92%D0%B8%D0%BA%D0%B8%D0%BF%D0%B5%D0%B4%D0%B8%D1%8F:Apple_M3"
)
_M3_MAX = (
    "Notebookcheck: https://www.notebookcheck.net/"
    "M3-Max-40-Core-GPU-vs-M1-Pro-14-Core-GPU-vs-M3-Max-30-Core-GPU_11636_10965_12034.247598.0.html"
)
_M3_ULTRA = "TechPowerUp: https://techpowerup.com/news-tags/Mac%20Studio"
_M3_GPU = (
    "128 units a core x 2 x 1.398 GHz: https://hmc-tech.com/gpu/apple-32-core-m4-max-vs-apple-40-core-m3-max"
)
_M4_GPU = (
    "128 units a core x 2 x 1.578 GHz: https://hmc-tech.com/gpu/apple-8-core-m4-fl-vs-apple-24-core-m1-max"
)
_M4 = (
    "Ars Technica, by https://goodnewsapodcast.com/"
    "apples-m4-m4-pro-and-m4-max-compared-to-past-generations-and-to-each-other"
)
_M4_MAX = "Apple, by MacRumors: https://www.macrumors.com/2024/10/30/apple-announces-m4-max-chip/"
_M5 = "Apple, by https://aivideo.la/apple-s-m5-chip-brings-faster-ai-to-macbook-ipad-and-vision-pro-3389.html"
_M5_PRO_MAX = (
    "Apple, by https://pepelac.news/en/posts/"
    "id30875-apple-m5-pro-and-m5-max-processors-unveiled-for-macbook-pro-laptops"
)
_M4_MAX_36 = "GizmoWeek: https://www.gizmoweek.com/mac-studio-paired-the-m3-ultra-with-m4-max/"
_M5_MAX_32 = "Cputronic: https://cputronic.com/cpu/apple-m5-max-32-core-gpu"
_FROM_MEMORY = f"Apple{FROM_MEMORY}"


def _gpu(cores: int, of: str) -> dict[str, Given]:
    """The rate of so many cores."""
    ghz = {_M3_GPU: 1.398, _M4_GPU: 1.578}[of]
    return {"fp32": (cores * 128 * 2 * ghz / 1e3, f"{cores} cores x {of}")}


APPLE: dict[str, Machine] = {
    "apple-m1": apple(
        "Apple M1", (16, _M1_MEMORY), (68.25, LLAMA_CPP), {"fp16": (5.5, LLAMA_CPP), "fp32": (2.6, _M1)}
    ),
    "apple-m1-pro": apple(
        "Apple M1 Pro", (32, _M1_PRO_MAX), (200, _M1_PRO_MAX), {"fp32": (5.2, _M1_PRO_MAX)}, (256, 6400)
    ),
    "apple-m1-max": apple(
        "Apple M1 Max", (64, _M1_PRO_MAX), (400, _M1_PRO_MAX), {"fp32": (10.4, _M1_PRO_MAX)}, (512, 6400)
    ),
    "apple-m1-ultra": apple(
        "Apple M1 Ultra", (128, _M1_ULTRA), (800, _M1_ULTRA), {"fp32": (21.2, _M1_ULTRA_RATE)}
    ),
    "apple-m2": apple(
        "Apple M2", (24, _M2), (100, _M2), {"fp16": (7, _KARPATHY), "fp32": (3.6, f"10 cores: {_M2_CORES}")}
    ),
    "apple-m2-pro": apple(
        "Apple M2 Pro", (32, _M2_PRO_MAX), (200, _M2_PRO_MAX), {"fp32": (6.8, f"19 cores: {_M2_CORES}")}
    ),
    "apple-m2-max": apple(
        "Apple M2 Max", (96, _M2_PRO_MAX), (400, _M2_PRO_MAX), {"fp32": (13.6, f"38 cores: {_M2_CORES}")}
    ),
    "apple-m2-ultra": apple(
        "Apple M2 Ultra", (192, _M2_ULTRA), (800, _M2_ULTRA), {"fp32": (27.2, f"all {_M2_CORES}")}
    ),
    "apple-m3": apple("Apple M3", (24, _M3), (100, f"{_M3}; {_M3_BUS}"), _gpu(10, _M3_GPU), (128, 6400)),
    "apple-m3-pro": apple("Apple M3 Pro", (36, _M3), (150, _M3_BUS), _gpu(18, _M3_GPU), (192, 6400)),
    "apple-m3-max-30core": apple(
        "Apple M3 Max 30-core", (96, _M3_MAX), (300, _FROM_MEMORY), _gpu(30, _M3_GPU), (384, 6400)
    ),
    "apple-m3-max-40core": apple(
        "Apple M3 Max 40-core",
        (128, _M3_MAX),
        (400, _M3_MAX),
        _gpu(40, _M3_GPU),
        (512, 6400),
    ),
    "apple-m3-ultra": apple("Apple M3 Ultra", (512, _M3_ULTRA), (819, _M3_ULTRA), _gpu(80, _M3_GPU)),
    "apple-m4": apple("Apple M4", (32, _M4), (120, _M4), _gpu(10, _M4_GPU)),
    "apple-m4-pro": apple("Apple M4 Pro", (64, _M4), (273, _M4), _gpu(20, _M4_GPU)),
    "apple-m4-max-32core": apple("Apple M4 Max 32-core", (36, _M4_MAX_36), (410, _M4), _gpu(32, _M4_GPU)),
    "apple-m4-max-40core": apple("Apple M4 Max 40-core", (128, _M4_MAX), (546, _M4_MAX), _gpu(40, _M4_GPU)),
    "apple-m5": apple("Apple M5", (32, _M5), (153, _M5), {}),
    "apple-m5-pro": apple("Apple M5 Pro", (64, _M5_PRO_MAX), (307, _M5_PRO_MAX), {}),
    "apple-m5-max-32core": apple("Apple M5 Max 32-core", (36, _FROM_MEMORY), (460, _M5_MAX_32), {}),
    "apple-m5-max-40core": apple("Apple M5 Max 40-core", (128, _M5_PRO_MAX), (614, _M5_PRO_MAX), {}),
}
