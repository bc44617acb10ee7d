// Rows of a BF16 record: K is stored by channel, V by token.
#include <crumb/error.h>
#include <crumb/page.h>

#include <cstring>

namespace crumb {

namespace {

size_t key_offset(int token, int channel) { return (size_t(channel) * kPageTokens + token) * sizeof(bf16); }

size_t value_offset(const PageFormat& format, int token, int channel) {
    return format.value_codes() + (size_t(token) * format.v.dim + channel) * sizeof(bf16);
}

bf16 load(const std::byte* at) {
    bf16 x;
    std::memcpy(&x, at, sizeof x);
    return x;
}

}  // namespace

bf16 key_at(const PageFormat& format, const std::byte* page, int token, int channel) {
    CRUMB_ASSERT(!format.coded());
    return load(page + key_offset(token, channel));
}

bf16 value_at(const PageFormat& format, const std::byte* page, int token, int channel) {
    CRUMB_ASSERT(!format.coded());
    return load(page + value_offset(format, token, channel));
}

void set_key(const PageFormat& format, std::byte* page, int token, std::span<const bf16> row) {
    CRUMB_ASSERT(!format.coded() && row.size() == size_t(format.k.dim));
    for (int i = 0; i < format.k.dim; ++i) {
        std::memcpy(page + key_offset(token, i), &row[i], sizeof(bf16));
    }
}

void set_value(const PageFormat& format, std::byte* page, int token, std::span<const bf16> row) {
    CRUMB_ASSERT(!format.coded() && row.size() == size_t(format.v.dim));
    std::memcpy(page + value_offset(format, token, 0), row.data(), row.size_bytes());
}

}  // namespace crumb
