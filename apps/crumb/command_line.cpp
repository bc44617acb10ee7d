#include "command_line.h"

#include <algorithm>
#include <cstdio>
#include <thread>

#include "ggml.h"

namespace crumb::app {

std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments) {
    for (auto& argument : arguments) {
        if (argument == "-ub") { argument = "--ubatch-size"; }
        if (argument == "-np") { argument = "--parallel"; }
        if (argument == "-kvu") { argument = "--kv-unified"; }
    }
    arguments.erase(arguments.begin());
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
    try {
        app.parse(std::move(arguments));
        return std::nullopt;
    } catch (const CLI::ExtrasError&) {  // CLI11 names them backwards
        std::string extras;
        for (const auto& extra : app.remaining(true)) { extras += " " + extra; }
        std::fprintf(stderr, "%s: error: unknown or too many:%s; %s --help lists what there is\n", app.get_name().c_str(), extras.c_str(),
                     app.get_name().c_str());
        return kUsageError;
    } catch (const CLI::Success& e) {  // --help
        return app.exit(e);
    } catch (const CLI::ParseError& e) {
        std::fprintf(stderr, "%s: error: %s; %s --help says more\n", app.get_name().c_str(), e.what(), app.get_name().c_str());
        return kUsageError;
    }
}

void add_threads(CLI::App& app, int& threads, const std::string& help) {
    const int cores = int(std::max(1u, std::thread::hardware_concurrency())), most = std::min(GGML_MAX_N_THREADS, 4 * cores);
    auto* option = app.add_option("-t,--threads", threads, help)->check(CLI::Validator(
        [=](const std::string& value) {
            int n = 0;
            return CLI::detail::lexical_cast(value, n) && n >= 1 && n <= most ? std::string()
                                                                              : fmt::format("{} is no number from 1 to {} (this machine has {} cores)", value, most, cores);
        },
        fmt::format("INT in [1 - {}]", most)));
    if (threads > 0) { option->capture_default_str(); }
}

}  // namespace crumb::app
