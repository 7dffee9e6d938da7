//! Headless Chromium, driven over a pipe by its DevTools protocol: the page as rendered, and the messages of its
//! console.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;

use testkit::process::Process;
use testkit::wait::{SOON, until};

/// A cold start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of one command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// A browser with one page open, killed on drop.
pub struct Browser {
    _process: Process,
    dir: TempDir,
    commands: File,
    messages: UnboundedReceiver<Value>,
    session: Value,
    last_id: u64,
    /// Messages of its console and its log, exceptions included.
    complaints: Vec<String>,
}

/// The installed browser, if any; `PAGE_BROWSER` names another.
pub fn installed() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("PAGE_BROWSER") {
        return Some(path.into());
    }
    let names = [
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
    ];
    let folders: Vec<_> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    folders
        .iter()
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|path| path.is_file())
}

impl Browser {
    /// Starts it with an empty page.
    pub async fn start(path: &Path) -> Browser {
        let dir = TempDir::with_prefix("rangecache-browser-").unwrap();
        let pipe = |name: &str| {
            let path = dir.path().join(name);
            let made = Command::new("mkfifo").arg(&path).status().unwrap();
            assert!(made.success(), "mkfifo");
            // Each end is open for reading and writing, so that neither side blocks on opening.
            let file = File::options().read(true).write(true).open(&path).unwrap();
            (path, file)
        };
        let (to_path, commands) = pipe("to");
        let (from_path, from) = pipe("from");
        // The protocol uses the descriptors 3 and 4.
        let mut command = Command::new("sh");
        command
            .args([
                "-c",
                r#"in=$1 out=$2; shift 2; exec "$@" 3<>"$in" 4<>"$out""#,
                "sh",
            ])
            .args([&to_path, &from_path])
            .arg(path)
            .args([
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
            ])
            .args([
                "--no-first-run",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
            ])
            .args([
                "--disable-extensions",
                "--hide-scrollbars",
                "--force-color-profile=srgb",
            ])
            .arg(format!(
                "--user-data-dir={}",
                dir.path().join("profile").display()
            ));
        let process = Process::spawn("the browser", &mut command, &dir.path().join("log"));
        let (sender, messages) = unbounded_channel();
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut message = Vec::new();
            while from.read_until(0, &mut message).is_ok_and(|bytes| bytes > 0) {
                message.pop();
                let read = serde_json::from_slice(&message).unwrap();
                message.clear();
                if sender.send(read).is_err() {
                    return;
                }
            }
        });
        let mut browser = Browser {
            _process: process,
            dir,
            commands,
            messages,
            session: Value::Null,
            last_id: 0,
            complaints: Vec::new(),
        };
        let target = browser
            .command_within(
                START_TIMEOUT,
                "Target.createTarget",
                json!({"url": "about:blank"}),
            )
            .await;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        browser.session = browser.command("Target.attachToTarget", attach).await["sessionId"].clone();
        for domain in ["Page", "Runtime", "Log"] {
            browser.command(&format!("{domain}.enable"), json!({})).await;
        }
        browser
    }

    /// Sends a command of the protocol, and returns its result.
    pub async fn command(&mut self, method: &str, params: Value) -> Value {
        self.command_within(COMMAND_TIMEOUT, method, params).await
    }

    async fn command_within(&mut self, limit: Duration, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        let mut message = json!({"id": id, "method": method, "params": params});
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes).unwrap();
        loop {
            let message = timeout(limit, self.messages.recv())
                .await
                .unwrap_or_else(|_| panic!("no response of the browser to {method}"))
                .expect("a message");
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(params["exceptionDetails"].to_string()),
            Some("Runtime.consoleAPICalled") => self.complaints.push(params["args"].to_string()),
            Some("Log.entryAdded") => self.complaints.push(params["entry"].to_string()),
            _ => {}
        }
    }

    /// Sets size and colour scheme of the screen.
    pub async fn look(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.command("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.command("Emulation.setEmulatedMedia", media).await;
    }

    /// Runs a script before any of the page's own, on every page opened from now on.
    pub async fn before_scripts(&mut self, script: &str) {
        self.command("Page.addScriptToEvaluateOnNewDocument", json!({"source": script}))
            .await;
    }

    /// Opens `url`, and waits until it is loaded.
    pub async fn open(&mut self, url: &str) {
        let opened = self.command("Page.navigate", json!({"url": url})).await;
        assert!(opened["errorText"].is_null(), "{opened}");
        self.wait_for("document.readyState === 'complete'").await;
    }

    /// Evaluates an expression of JavaScript on the page.
    pub async fn evaluate(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.command("Runtime.evaluate", asked).await;
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub async fn wait_for(&mut self, expression: &str) {
        until(SOON, expression, async || {
            (self.evaluate(expression).await == true).then_some(())
        })
        .await;
    }

    /// All messages of the console so far.
    pub async fn complaints(&mut self) -> &[String] {
        // Messages before this command's response have been recorded when it arrives.
        self.evaluate("0").await;
        &self.complaints
    }

    /// Writes a screenshot of the whole page, as a PNG.
    pub async fn picture(&mut self, path: &Path) {
        let asked = json!({"format": "png", "captureBeyondViewport": true});
        let answer = self.command("Page.captureScreenshot", asked).await;
        let text = answer["data"].as_str().expect("has data");
        // The standard library has no base64 decoder.
        let encoded = self.dir.path().join("picture");
        std::fs::write(&encoded, text).unwrap();
        let decoded = Command::new("base64").arg("-d").arg(&encoded).output().unwrap();
        assert!(decoded.status.success(), "base64");
        std::fs::write(path, decoded.stdout).unwrap();
    }
}
