#include "texts.h"

#include "command_line.h"

#include <crumb/error.h>

#include <cstdlib>
#include <iterator>
#include <set>

namespace crumb::app {

namespace {

std::filesystem::path place(const std::filesystem::path& file) { return std::filesystem::weakly_canonical(std::filesystem::absolute(file)); }

}  // namespace

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

void require_different_texts(const std::vector<std::filesystem::path>& files) {
    std::vector<std::string> places;
    for (const auto& file : files) { places.push_back(place(file).string()); }
    require_once("-f", places);
}

std::vector<std::string> text_names(const std::vector<std::filesystem::path>& files) {
    std::vector<std::filesystem::path> whole;
    for (const auto& file : files) { whole.push_back(place(file)); }
    std::vector<std::string> names;
    for (const auto& file : files) { names.push_back(file.stem().string()); }
    const auto ambiguous = [&] {
        const std::set<std::string> different(names.begin(), names.end());
        return different.size() < names.size() || different.contains("all");
    };
    for (std::ptrdiff_t parts = 1; ambiguous(); ++parts) {
        for (size_t i = 0; i < files.size(); ++i) {
            std::filesystem::path end;
            for (auto part = std::prev(whole[i].end(), std::min(parts, std::distance(whole[i].begin(), whole[i].end()))); part != whole[i].end(); ++part) { end /= *part; }
            names[i] = end.string();
        }
    }
    return names;
}

std::vector<llama_token> first_tokens(const llama_model* model, const std::filesystem::path& file, size_t n) {
    auto tokens = llama::tokenize(model, llama::read_beginning(file, n), false, false);
    if (tokens.size() < n) {
        fail("{} has {} tokens, {} are needed: take a longer text, a smaller -c or fewer --windows", file.string(), tokens.size(), n);
    }
    tokens.resize(n);
    return tokens;
}

}  // namespace crumb::app
