"""Lengths of real chats: tokens of prompts and of their answers, in pairs.

160 of the 19,366 rows of `AzureLLMInferenceTrace_conv.csv`, the conversations of an Azure service on 16 November 2023:
40 in a row from each quarter of the file.
Source: github.com/Azure/AzurePublicDataset, by Microsoft, licensed CC BY 4.0; the times are left out. It belongs to:
P. Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.
"""

from __future__ import annotations

import random

from benchmarks.workloads import Request

_ROWS = """
181,85 1029,388 888,418 1113,375 1035,520 1009,425 869,450 1183,431 972,395 1097,396 206,183 181,208 1316,200 908,456
1094,422 996,422 420,89 1112,385 1133,396 890,403 833,36 1093,426 206,211 898,454 1312,180 1129,396 375,67 862,425
167,179 914,414 209,217 982,594 200,161 1313,156 999,416 1084,397 399,106 1065,594 1036,446 1243,398
1145,402 200,217 9,138 1072,395 380,101 2092,95 1090,395 181,119 1019,468 1192,646 212,162 375,122 1039,571 1131,419
1016,402 181,133 404,107 200,179 303,18 2812,300 411,169 1008,394 1671,69 1110,527 1094,429 1089,621 1038,427 1028,468
1145,404 398,81 409,86 1102,386 215,217 1132,419 1094,402 4085,111 4092,105 1022,482 4089,48 209,179
405,116 389,96 400,90 7,142 4080,48 403,100 384,65 387,82 422,96 399,96 4090,60 378,90 1152,49 409,100 395,85 415,84
1315,226 4083,127 1201,375 2367,56 1017,534 386,111 4076,33 1141,95 4509,134 380,90 398,126 405,162 374,110 4078,154
4081,56 401,93 406,93 378,90 401,109 401,108 910,91 381,87 402,83 4078,34
197,65 827,80 194,112 1058,379 1320,196 1325,182 1288,404 1035,429 1310,375 202,96 1116,428 1427,83 2345,74 11,61
209,101 401,84 1136,62 395,127 19,86 990,546 1082,427 246,108 185,76 210,111 1095,490 914,86 203,88 208,100 996,389
181,158 205,76 1350,163 1033,382 401,97 393,93 403,133 1048,396 3955,106 1321,63 1073,440
"""
LENGTHS = [(int(prompt), int(answer)) for prompt, answer in (row.split(",") for row in _ROWS.split())]


def chat_requests(count: int, *, most: int | None, vocab_size: int, seed: int) -> list[Request]:
    """Random token ids with lengths drawn from `LENGTHS`. `most`: tokens of a prompt; longer ones are cut to these."""
    ids = random.Random(seed)
    drawn = ids.choices(LENGTHS, k=count)
    return [Request(ids.choices(range(vocab_size), k=min(prompt, most or prompt)), answer) for prompt, answer in drawn]
