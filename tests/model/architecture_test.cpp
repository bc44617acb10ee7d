// Architectures whose memory crumb does not replace are refused by name, also those that never ask for a KV cache: a
// model that silently ran without crumb would look like a success.
#include "fixture.h"
#include "tiny_gguf.h"

namespace crumb::llama {
namespace {

constexpr int64_t kEmbd = 64, kVocab = 32, kFf = 128;

void common_keys(TinyGguf& gguf) {
    gguf.set("vocab_size", uint32_t(kVocab));
    gguf.set("context_length", uint32_t(128));
    gguf.set("embedding_length", uint32_t(kEmbd));
    gguf.set("block_count", uint32_t(1));
    gguf.tensor("token_embd.weight", {kEmbd, kVocab});
}

// An encoder: it has no memory at all.
void bert(TinyGguf& gguf) {
    common_keys(gguf);
    gguf.set("feed_forward_length", uint32_t(kFf));
    gguf.set("attention.head_count", uint32_t(2));
    gguf.set("attention.layer_norm_epsilon", 1e-5f);
    gguf.set("attention.causal", false);
    gguf.set_global("tokenizer.ggml.token_type_count", 2);
    gguf.tensor("position_embd.weight", {kEmbd, 128});
    for (const char* norm : {"token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"}) {
        gguf.tensor(std::string(norm) + ".weight", {kEmbd});
        gguf.tensor(std::string(norm) + ".bias", {kEmbd});
    }
    for (const char* w : {"attn_q", "attn_k", "attn_v", "attn_output"}) {
        gguf.tensor(std::string("blk.0.") + w + ".weight", {kEmbd, kEmbd});
    }
    gguf.tensor("blk.0.ffn_up.weight", {kEmbd, kFf});
    gguf.tensor("blk.0.ffn_down.weight", {kFf, kEmbd});
}

// A recurrent state of fixed size.
void mamba(TinyGguf& gguf) {
    constexpr int64_t kInner = 128, kConv = 4, kState = 16, kRank = 4;
    common_keys(gguf);
    gguf.set("ssm.conv_kernel", uint32_t(kConv));
    gguf.set("ssm.inner_size", uint32_t(kInner));
    gguf.set("ssm.state_size", uint32_t(kState));
    gguf.set("ssm.time_step_rank", uint32_t(kRank));
    gguf.set("attention.layer_norm_rms_epsilon", 1e-5f);
    gguf.tensor("output_norm.weight", {kEmbd});
    gguf.tensor("blk.0.attn_norm.weight", {kEmbd});
    gguf.tensor("blk.0.ssm_in.weight", {kEmbd, 2 * kInner});
    gguf.tensor("blk.0.ssm_conv1d.weight", {kConv, kInner});
    gguf.tensor("blk.0.ssm_conv1d.bias", {kInner});
    gguf.tensor("blk.0.ssm_x.weight", {kInner, kRank + 2 * kState});
    gguf.tensor("blk.0.ssm_dt.weight", {kRank, kInner});
    gguf.tensor("blk.0.ssm_dt.bias", {kInner});
    gguf.tensor("blk.0.ssm_a", {kState, kInner});
    gguf.tensor("blk.0.ssm_d", {kInner});
    gguf.tensor("blk.0.ssm_out.weight", {kInner, kEmbd});
}

// Multi-head latent attention: it asks for a KV cache, of latents.
void deepseek2(TinyGguf& gguf) {
    constexpr int64_t kHeads = 2, kRope = 16, kNope = 32, kLatent = 32, kValue = 32;
    common_keys(gguf);
    gguf.set("feed_forward_length", uint32_t(kFf));
    gguf.set("attention.head_count", uint32_t(kHeads));
    gguf.set("attention.head_count_kv", uint32_t(1));
    gguf.set("attention.layer_norm_rms_epsilon", 1e-5f);
    gguf.set("attention.key_length", uint32_t(kLatent + kRope));
    gguf.set("attention.value_length", uint32_t(kLatent));
    gguf.set("attention.key_length_mla", uint32_t(kNope + kRope));
    gguf.set("attention.value_length_mla", uint32_t(kValue));
    gguf.set("attention.q_lora_rank", uint32_t(0));
    gguf.set("attention.kv_lora_rank", uint32_t(kLatent));
    gguf.set("rope.dimension_count", uint32_t(kRope));
    gguf.set("leading_dense_block_count", uint32_t(1));
    gguf.set("expert_feed_forward_length", uint32_t(kFf));
    gguf.set("expert_shared_count", uint32_t(1));
    gguf.tensor("output_norm.weight", {kEmbd});
    gguf.tensor("blk.0.attn_norm.weight", {kEmbd});
    gguf.tensor("blk.0.attn_kv_a_norm.weight", {kLatent});
    gguf.tensor("blk.0.attn_q.weight", {kEmbd, kHeads * (kNope + kRope)});
    gguf.tensor("blk.0.attn_kv_a_mqa.weight", {kEmbd, kLatent + kRope});
    gguf.tensor("blk.0.attn_k_b.weight", {kNope, kLatent, kHeads});
    gguf.tensor("blk.0.attn_v_b.weight", {kLatent, kValue, kHeads});
    gguf.tensor("blk.0.attn_output.weight", {kHeads * kValue, kEmbd});
    gguf.tensor("blk.0.ffn_norm.weight", {kEmbd});
    gguf.tensor("blk.0.ffn_gate.weight", {kEmbd, kFf});
    gguf.tensor("blk.0.ffn_up.weight", {kEmbd, kFf});
    gguf.tensor("blk.0.ffn_down.weight", {kFf, kEmbd});
}

struct Case {
    const char* architecture;
    void (*fill)(TinyGguf&);
};

class Architecture : public testing::TestWithParam<Case> {};

TEST_P(Architecture, IsRefusedByNameAndRunsWithoutKv) {
    quiet_log();
    const auto path = std::filesystem::path(CRUMB_SCRATCH) / (std::string(GetParam().architecture) + ".gguf");
    TinyGguf gguf(GetParam().architecture);
    GetParam().fill(gguf);
    gguf.write(path);
    const auto model = load_model(path);
    try {
        new_context(model.get(), {.n_ctx = 128, .n_ubatch = 64}, kv("quarot:paper"));
        ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
        EXPECT_THAT(e.what(), testing::AllOf(testing::HasSubstr(GetParam().architecture), testing::HasSubstr("without --kv")));
    }
    EXPECT_NE(new_context(model.get(), {.n_ctx = 128, .n_ubatch = 64}, std::nullopt), nullptr);
}

INSTANTIATE_TEST_SUITE_P(All, Architecture, testing::Values(Case{"bert", bert}, Case{"mamba", mamba}, Case{"deepseek2", deepseek2}),
                         [](const auto& info) { return std::string(info.param.architecture); });

}  // namespace
}  // namespace crumb::llama
