#include "texts.h"

#include <crumb/error.h>

#include <cstdlib>

namespace crumb::app {

std::vector<std::filesystem::path> fetched_texts(const char* half) {
    const auto variable = [](const char* name) { return std::filesystem::path(std::getenv(name) ? std::getenv(name) : ""); };
    auto cache = variable("CRUMB_CACHE");
    if (cache.empty()) { cache = (variable("XDG_CACHE_HOME").empty() ? variable("HOME") / ".cache" : variable("XDG_CACHE_HOME")) / "crumb"; }
    std::vector<std::filesystem::path> texts;
    for (const char* domain : {"docs.txt", "prose.txt", "code.txt", "languages.txt"}) {
        texts.push_back(cache / "text" / half / domain);
        if (!std::filesystem::exists(texts.back())) {
            fail("no text was given, and {} has not been fetched: give -f FILE, several times for several domains, or type\n"
                 "    tools/fetch.py text",
                 texts.back().string());
        }
    }
    return texts;
}

std::vector<llama_token> first_tokens(const llama_model* model, const std::filesystem::path& file, size_t n) {
    // Some tokenizers take the square of the length in time: no more text than is needed, at most 8 bytes a token.
    std::string text = llama::read_text(file);
    if (text.size() > 8 * n) {
        size_t end = 8 * n;
        while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) { --end; }  // not inside a character
        text.resize(end);
    }
    auto tokens = llama::tokenize(model, text, false, false);
    if (tokens.size() < n) {
        fail("{} has {} tokens, {} are needed: take a longer text, a smaller -c or fewer --windows", file.string(), tokens.size(), n);
    }
    tokens.resize(n);
    return tokens;
}

}  // namespace crumb::app
