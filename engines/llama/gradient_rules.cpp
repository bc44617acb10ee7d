#include "gradient_rules.h"

#include <crumb/error.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "ggml-backend.h"
#include "ggml.h"

namespace crumb::llama {

namespace {

// Values of op_params, which holds numbers of four bytes.
template <class T>
T parameter(const ggml_tensor* node, int index) {
    T value;
    std::memcpy(&value, node->op_params + index, sizeof(value));
    return value;
}

[[noreturn]] void no_rule(const ggml_tensor* node, const std::string& what) {
    fail("its graph has {} ('{}'), and the gradient has no rule for it", what, node->name);
}

bool is_weight(const ggml_tensor* t) {
    return t->op == GGML_OP_NONE && t->buffer && ggml_backend_buffer_is_host(t->buffer) && t->ne[2] == 1 &&
           t->ne[3] == 1;
}

// d/dx of x (1 + tanh(a x + a b x^3)) / 2, as ggml computes it
ggml_tensor* gelu_slope(ggml_context* c, ggml_tensor* x) {
    constexpr float a = 0.79788456080286535588f, b = 0.044715f;
    ggml_tensor* square = ggml_sqr(c, x);
    ggml_tensor* t = ggml_tanh(c, ggml_mul(c, x, ggml_scale_bias(c, square, a * b, a)));
    ggml_tensor* inner = ggml_mul(c, x, ggml_scale_bias(c, square, 3 * a * b, a));
    ggml_tensor* outer = ggml_scale_bias(c, ggml_sqr(c, t), -0.5f, 0.5f);
    return ggml_add(c, ggml_mul(c, outer, inner), ggml_scale_bias(c, t, 0.5f, 0.5f));
}

// gradient - mean of its rows
ggml_tensor* centred(ggml_context* c, ggml_tensor* x) { return ggml_sub(c, x, ggml_mean(c, x)); }

// `gradient` of a result that `to` was repeated for
ggml_tensor* summed(ggml_context* c, ggml_tensor* gradient, const ggml_tensor* to) {
    return ggml_are_same_shape(gradient, to) ? gradient
                                             : ggml_repeat_back(c, gradient, const_cast<ggml_tensor*>(to));
}

}  // namespace

ggml_tensor* contiguous(ggml_context* c, ggml_tensor* t) { return ggml_is_contiguous(t) ? t : ggml_cont(c, t); }

ggml_tensor* transposed(ggml_context* c, ggml_tensor* t) { return ggml_cont(c, ggml_transpose(c, t)); }

void Reverse::add(ggml_tensor* tensor, ggml_tensor* gradient) {
    if (!needs(tensor)) {
        return;
    }
    CRUMB_ASSERT(ggml_are_same_shape(tensor, gradient));
    ggml_tensor*& sum = gradients_[tensor];
    sum = sum ? ggml_add(context_, sum, gradient) : gradient;
}

ggml_tensor* Reverse::gradient(ggml_tensor* tensor) const {
    const auto found = gradients_.find(tensor);
    return found == gradients_.end() ? nullptr : found->second;
}

void Reverse::run(const std::vector<ggml_tensor*>& nodes, ggml_tensor* result, ggml_tensor* gradient) {
    for (ggml_tensor* node : nodes) {
        const bool any = std::any_of(std::begin(node->src), std::end(node->src),
                                     [&](const ggml_tensor* source) { return source && needs(source); });
        if (any || rules_.contains(node)) {
            needed_.insert(node);
        }
    }
    add(result, gradient);
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
        if (const auto found = gradients_.find(*node); found != gradients_.end()) {
            step(*node, contiguous(context_, found->second));
        }
    }
}

ggml_tensor* Reverse::through_weight(ggml_tensor* weight, ggml_tensor* gradient) {
    if (weight->type != GGML_TYPE_F32) {
        weight = ggml_cast(context_, weight, GGML_TYPE_F32);
    }
    return ggml_mul_mat(context_, transposed(context_, weight), gradient);
}

void Reverse::step(ggml_tensor* node, ggml_tensor* g) {
    if (const auto own = rules_.find(node); own != rules_.end()) {
        own->second(*this, g);
        return;
    }
    ggml_context* c = context_;
    ggml_tensor *a = node->src[0], *b = node->src[1];
    if (node->type != GGML_TYPE_F32) {
        no_rule(node, fmt::format("{} in {}", ggml_op_desc(node), ggml_type_name(node->type)));
    }
    switch (node->op) {
        case GGML_OP_ADD:
            add(a, g);
            if (needs(b)) {
                add(b, summed(c, g, b));
            }
            break;
        case GGML_OP_SUB:
            add(a, g);
            if (needs(b)) {
                add(b, summed(c, ggml_neg(c, g), b));
            }
            break;
        case GGML_OP_MUL:
            if (needs(a)) {
                add(a, ggml_mul(c, g, b));
            }
            if (needs(b)) {
                add(b, summed(c, ggml_mul(c, contiguous(c, a), g), b));
            }
            break;
        case GGML_OP_SCALE: add(a, ggml_scale(c, g, parameter<float>(node, 0))); break;
        case GGML_OP_SQR: add(a, ggml_mul(c, g, ggml_scale(c, contiguous(c, a), 2))); break;
        case GGML_OP_RMS_NORM: add(a, ggml_rms_norm_back(c, g, contiguous(c, a), parameter<float>(node, 0))); break;
        case GGML_OP_NORM: {  // the RMS norm of what remains without the mean
            ggml_tensor* x = centred(c, contiguous(c, a));
            add(a, centred(c, ggml_rms_norm_back(c, g, x, parameter<float>(node, 0))));
            break;
        }
        case GGML_OP_MUL_MAT:
            if (needs(a)) {
                no_rule(node, "a product of two activations outside attention");
            }
            if (!is_weight(a)) {
                no_rule(node, fmt::format("a product with {} that is no matrix of weights in this computer's memory",
                                          a->name));
            }
            add(b, through_weight(a, g));
            break;
        case GGML_OP_ROPE: {
            const int32_t* p = node->op_params;
            if (p[2] & (GGML_ROPE_TYPE_MROPE | GGML_ROPE_TYPE_VISION)) {
                no_rule(node, "RoPE with several positions a token (M-RoPE)");
            }
            const auto f = [&](int i) { return parameter<float>(node, 5 + i); };
            add(a, ggml_rope_ext_back(c, g, b, node->src[2], p[1], p[2], p[4], f(0), f(1), f(2), f(3), f(4), f(5)));
            break;
        }
        case GGML_OP_CONT:
        case GGML_OP_DUP:
        case GGML_OP_RESHAPE:
            if (a->type != GGML_TYPE_F32) {
                no_rule(node, fmt::format("{} of {}", ggml_op_desc(node), ggml_type_name(a->type)));
            }
            add(a, ggml_reshape(c, g, a));
            break;
        case GGML_OP_PERMUTE: {
            int axis[GGML_MAX_DIMS];
            for (int i = 0; i < GGML_MAX_DIMS; ++i) {
                axis[node->op_params[i]] = i;
            }
            add(a, ggml_cont(c, ggml_permute(c, g, axis[0], axis[1], axis[2], axis[3])));
            break;
        }
        case GGML_OP_TRANSPOSE: add(a, transposed(c, g)); break;
        case GGML_OP_VIEW: {  // pieces of a fused projection
            const size_t offset = node->view_offs - a->view_offs;
            if (!ggml_is_contiguous(a) || node->nb[0] != sizeof(float) || node->nb[3] > INT32_MAX ||
                offset > INT32_MAX) {
                no_rule(node, "a view with gaps between its elements");
            }
            ggml_tensor* zeros = ggml_fill(c, a, 0.0f);
            add(a, ggml_acc_inplace(c, zeros, g, node->nb[1], node->nb[2], node->nb[3], offset));
            break;
        }
        case GGML_OP_GET_ROWS:
            if (!ggml_is_matrix(a) || !ggml_is_vector(b)) {
                no_rule(node, "GET_ROWS of more than a matrix");
            }
            add(a, ggml_get_rows_back(c, g, b, a));
            break;
        case GGML_OP_UNARY: unary(node, g); break;
        case GGML_OP_GLU: gate(node, g); break;
        default: no_rule(node, fmt::format("the operation {}", ggml_op_desc(node)));
    }
}

void Reverse::unary(ggml_tensor* node, ggml_tensor* g) {
    ggml_context* c = context_;
    ggml_tensor* x = contiguous(c, node->src[0]);
    ggml_tensor* slope = nullptr;
    switch (ggml_get_unary_op(node)) {
        case GGML_UNARY_OP_SILU: add(node->src[0], ggml_silu_back(c, g, x)); return;
        case GGML_UNARY_OP_GELU: slope = gelu_slope(c, x); break;
        case GGML_UNARY_OP_RELU: slope = ggml_step(c, x); break;
        case GGML_UNARY_OP_TANH: slope = ggml_scale_bias(c, ggml_sqr(c, node), -1, 1); break;
        case GGML_UNARY_OP_SIGMOID: slope = ggml_mul(c, node, ggml_scale_bias(c, node, -1, 1)); break;
        default: no_rule(node, fmt::format("the operation {}", ggml_op_desc(node)));
    }
    add(node->src[0], ggml_mul(c, g, slope));
}

// y = f(x) u: x and u are two tensors, or the halves of one
void Reverse::gate(ggml_tensor* node, ggml_tensor* g) {
    ggml_context* c = context_;
    ggml_tensor *a = node->src[0], *b = node->src[1], *x = a, *u = b;
    const bool swapped = parameter<int32_t>(node, 1) != 0;
    if (!b) {
        const auto half = [&](bool second) {
            ggml_tensor* whole = contiguous(c, a);
            return ggml_cont(c, ggml_view_4d(c, whole, a->ne[0] / 2, a->ne[1], a->ne[2], a->ne[3], whole->nb[1],
                                             whole->nb[2], whole->nb[3], second ? whole->nb[1] / 2 : 0));
        };
        x = half(swapped);
        u = half(!swapped);
    }
    x = contiguous(c, x);
    ggml_tensor *to_x = ggml_mul(c, g, contiguous(c, u)), *to_u = nullptr;
    switch (ggml_get_glu_op(node)) {
        case GGML_GLU_OP_SWIGLU:
            to_x = ggml_silu_back(c, to_x, x);
            to_u = ggml_silu(c, x);
            break;
        case GGML_GLU_OP_GEGLU:
            to_x = ggml_mul(c, to_x, gelu_slope(c, x));
            to_u = ggml_gelu(c, x);
            break;
        case GGML_GLU_OP_REGLU:
            to_x = ggml_mul(c, to_x, ggml_step(c, x));
            to_u = ggml_relu(c, x);
            break;
        default: no_rule(node, fmt::format("the gate {}", ggml_op_desc(node)));
    }
    to_u = ggml_mul(c, g, to_u);
    if (b) {
        add(a, to_x);
        add(b, to_u);
    } else {
        add(a, swapped ? ggml_concat(c, to_u, to_x, 0) : ggml_concat(c, to_x, to_u, 0));
    }
}

}  // namespace crumb::llama
