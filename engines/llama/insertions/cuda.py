"""Nodes of another library on CUDA's streams."""
from insertions.hook import Hook

CUDA_H = "ggml/include/ggml-cuda.h"
CUDA_CU = "ggml/src/ggml-cuda/ggml-cuda.cu"

CUDA_DECLARE = """\
// let another library run GGML_OP_CUSTOM nodes on CUDA
//   supports: whether it runs this node on this device (otherwise the node goes to the CPU)
//   launch:   enqueue the node on the stream; must not synchronise, and may be captured once and replayed many times
typedef bool (*ggml_backend_cuda_custom_supports_t)(int device, const struct ggml_tensor * op);
typedef void (*ggml_backend_cuda_custom_launch_t)  (int device, struct ggml_tensor * op, void * stream);

GGML_BACKEND_API void ggml_backend_cuda_set_custom(ggml_backend_cuda_custom_supports_t supports, ggml_backend_cuda_custom_launch_t launch);

"""

CUDA_DEFINE = """\
static ggml_backend_cuda_custom_supports_t g_custom_supports = nullptr;
static ggml_backend_cuda_custom_launch_t   g_custom_launch   = nullptr;

void ggml_backend_cuda_set_custom(ggml_backend_cuda_custom_supports_t supports, ggml_backend_cuda_custom_launch_t launch) {
    g_custom_supports = supports;
    g_custom_launch   = launch;
}

"""

CUDA_RUN = """\
        case GGML_OP_CUSTOM:
            g_custom_launch(ctx.device, dst, (void *) ctx.stream());
            break;
"""

CUDA_SUPPORTS = """\
        case GGML_OP_CUSTOM:
            return g_custom_supports && g_custom_launch && g_custom_supports(dev_ctx->device, op);
"""

CUDA_LOOKUP = """\
    if (strcmp(name, "ggml_backend_cuda_set_custom") == 0) {
        return (void *)ggml_backend_cuda_set_custom;
    }
"""

HOOKS = [
    Hook("CUDA declaration", CUDA_H, "before", r"^GGML_BACKEND_API ggml_backend_reg_t ggml_backend_cuda_reg\(", CUDA_DECLARE),
    Hook("CUDA definition", CUDA_CU, "before", r"^static bool ggml_cuda_compute_forward\(", CUDA_DEFINE),
    Hook("CUDA launch", CUDA_CU, "before", r"^ *case GGML_OP_FLASH_ATTN_EXT:\n *ggml_cuda_flash_attn_ext\(", CUDA_RUN,
         after=r"^static bool ggml_cuda_compute_forward\("),
    Hook("CUDA support", CUDA_CU, "before", r"^ *case GGML_OP_FLASH_ATTN_EXT:\n *return", CUDA_SUPPORTS,
         after=r"^static bool ggml_backend_cuda_device_supports_op\("),
    Hook("CUDA lookup", CUDA_CU, "before", r"^ *return nullptr;\n", CUDA_LOOKUP,
         after=r"^static void \* ggml_backend_cuda_reg_get_proc_address\("),
]
