"""Pages of another library in the server, and what it answers to a body that is no JSON."""
from insertions.hook import Hook

HTTP_H = "tools/server/server-http.h"
HTTP_CPP = "tools/server/server-http.cpp"
SERVER_MAIN = "tools/server/server.cpp"

HTTP_DECLARE = """\
// a page of another library
struct server_http_page {
    std::string path;
    std::string content_type;
    bool        is_public; // without API key, while the model loads too, and not with --no-ui
    std::function<std::string()> content; // called by any thread
};

// before the server starts
void server_http_set_pages(std::vector<server_http_page> pages);

"""

HTTP_DEFINE = """\
static std::vector<server_http_page> g_pages;

void server_http_set_pages(std::vector<server_http_page> pages) {
    g_pages = std::move(pages);
}

"""

HTTP_PUBLIC = """\
        for (const auto & page : g_pages) {
            if (page.is_public) {
                paths.insert(page.path);
            }
        }
"""

HTTP_SERVE = """\
    for (const auto & page : g_pages) {
        if (params.ui || !page.is_public) {
            srv->Get(params.api_prefix + page.path, [&page](const httplib::Request &, httplib::Response & res) {
                res.set_header("Cache-Control", "no-cache");
                res.set_content(page.content(), page.content_type);
            });
        }
    }

"""

HTTP_BAD_JSON = """\
        } catch (const common_json_error & e) {
            // no JSON, or not of the shape that was asked for: of the client's making (400)
            error = ERROR_TYPE_INVALID_REQUEST;
            message = e.what();
"""

HOOKS = [
    Hook("page declaration", HTTP_H, "before", r"^struct server_http_context \{\n", HTTP_DECLARE),
    Hook("page definition", HTTP_CPP, "before", r"^class server_http_context::Impl \{\n", HTTP_DEFINE),
    Hook("public pages", HTTP_CPP, "behind", r"^ *std::unordered_set<std::string> paths \{ \"/\" \};\n", HTTP_PUBLIC),
    Hook("bodies that are no JSON", SERVER_MAIN, "before", r"^        \} catch \(const std::exception & e\) \{\n            // treat other exceptions", HTTP_BAD_JSON),
    Hook("pages", HTTP_CPP, "before", r"^    // a browser that used the built-in UI keeps its service worker", HTTP_SERVE),
]
