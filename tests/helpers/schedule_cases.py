"""µGraphs for tests of the space of schedules, by name."""

from tests.helpers import kernel_cases

SPACES = {
    "norm linear": kernel_cases.rms_norm_linear(1, 4096, 4096),
    "3 rows": kernel_cases.rms_norm_linear(3, 896, 37),
    "16 rows": kernel_cases.rms_norm_linear(16, 4096, 4096),
    "lora": kernel_cases.lora(1, 4096, 4096),
    "softmax": kernel_cases.softmax(64, 4096),
    "ntrans": kernel_cases.ntrans(16, 4096),
    "batched": kernel_cases.batched_matmul(),
    "attention": kernel_cases.attention_row(64, 1, 4096, 128),
    "online": kernel_cases.online_attention(32, 300, 300, 128),
    "split": kernel_cases.online_attention(8, 4, 5000, 128, 8),
    "split matmul": kernel_cases.split_matmul(16, 4096, 1024, 4),
    "split softmax": kernel_cases.split_softmax(4, 100000, 8),
}
